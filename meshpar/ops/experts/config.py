"""A mixture of experts: its weights, and its settings of routing and buffers."""

import dataclasses
import math
from typing import NamedTuple

from meshpar.arrays import Array
from meshpar.errors import MeshparError

DROPLESS = "dropless"
ROUTINGS = "capacity", DROPLESS
"""How tokens get to their experts: into slots of a fixed number, or all of them."""

SCORES = ("softmax", "sigmoid")
"""Functions that turn the router's logits into scores."""


class Experts(NamedTuple):
    """Weights of the experts, with dims named ("expert", "embed", "mlp").

    Attributes:
      up: first matrix.
      down: last matrix, ("expert", "mlp", "embed").
      gate: of a gated mlp; None for a plain one.
    """

    up: Array
    down: Array
    gate: Array | None = None


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """Settings of a mixture of experts. No field depends on a layout.

    Attributes:
      num_experts: E.
      experts_per_token: X, the experts that each token goes to (top-k).
      routing: "capacity" gives every expert a number of slots for each group of tokens
        and drops the choices beyond them; "dropless" drops none.
      capacity_factor: slots of an expert as a multiple of an even share.
      group: tokens of a sequence that share an expert's slots; 0 for the whole
        sequence. It is never the tokens of a device, so a layout drops no other tokens.
      bound: with dropless routing, the most choices that one device sends to another,
        as a multiple of an even share; those beyond it are dropped and counted as
        overflow. 0 for none.
      score: "softmax" over the experts, or "sigmoid" of each.
      normalize: whether the weights of a token's experts are divided by their sum.
      scale: factor of the weights.
      jitter: inputs of the router are multiplied by random numbers in 1 +- jitter.
      num_nodes: groups of consecutive experts among which a token is limited to
        `nodes_per_token` (node-limited routing); 1 for no limit.
      nodes_per_token: groups that a token may go to.

    Raises:
      MeshparError: a value out of range, or values that do not go together.

    Source: Lepikhin et al., GShard, arXiv:2006.16668, section 2.2; Fedus et al.,
      Switch Transformers, arXiv:2101.03961 (jitter); Gale et al., MegaBlocks,
      arXiv:2211.15841 (dropless); DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    num_experts: int
    experts_per_token: int = 2
    routing: str = "capacity"
    capacity_factor: float = 1.25
    group: int = 0
    bound: float = 0.0
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    jitter: float = 0.0
    num_nodes: int = 1
    nodes_per_token: int = 1

    def __post_init__(self):
        for name, known in (("routing", ROUTINGS), ("score", SCORES)):
            if getattr(self, name) not in known:
                raise MeshparError(
                    f"{name}={getattr(self, name)!r}: use one of {known}"
                )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise MeshparError(
                f"experts_per_token={self.experts_per_token}: use 1 to "
                f"num_experts={self.num_experts}"
            )
        if self.capacity_factor <= 0:
            raise MeshparError(
                f"capacity_factor={self.capacity_factor} leaves no expert a slot: use "
                "more than 0, such as 1.25"
            )
        for name in ("group", "bound"):
            if getattr(self, name) < 0:
                raise MeshparError(f"{name}={getattr(self, name)}: use 0 or more")
        if not 0 <= self.jitter < 1:
            raise MeshparError(f"jitter={self.jitter}: use 0 <= jitter < 1")
        self._check_nodes()

    def _check_nodes(self) -> None:
        nodes, used = self.num_nodes, self.nodes_per_token
        if nodes < 1 or self.num_experts % nodes or not 1 <= used <= nodes:
            raise MeshparError(
                f"num_nodes={nodes}, nodes_per_token={used}: num_nodes must divide "
                f"num_experts={self.num_experts}, and a token use 1 to num_nodes"
            )
        if used * (self.num_experts // nodes) < self.experts_per_token:
            raise MeshparError(
                f"nodes_per_token={used} leaves a token "
                f"{used * self.num_experts // nodes} experts, fewer than "
                f"experts_per_token={self.experts_per_token}; use more"
            )

    def tokens_per_group(self, length: int) -> int:
        """Tokens that share an expert's slots.

        Raises:
          MeshparError: a sequence does not divide into groups.
        """
        group = self.group or length
        if length % group:
            raise MeshparError(
                f"group={group} does not divide sequences of {length} tokens; use a "
                "divisor, or 0 for the whole sequence"
            )
        return group

    def capacity(self, length: int) -> int:
        """Slots of one expert for one group, at least 1 and at most its tokens."""
        group = self.tokens_per_group(length)
        share = self.capacity_factor * self.experts_per_token * group
        return min(group, max(1, math.ceil(share / self.num_experts)))

    def most_sent(self, choices: int, devices: int) -> int:
        """Most choices that one device sends to another with dropless routing.

        Args:
          choices: choices of the tokens of one device.
          devices: devices that share the experts.
        """
        share = self.bound * choices / devices
        return min(choices, max(1, math.ceil(share))) if self.bound else choices
