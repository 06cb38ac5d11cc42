"""Islands: the optimizer mode of workers that train at their own pace.

An island is a program under a layout of its own, on its share of the devices. It pulls
weights from a store and pushes gradients, or differences of weights. No collective
crosses islands, so they may differ in speed, die and come back.

    algorithm         what is pushed            what the store does with it
    downpour          gradients                 the server's optimizer (Adagrad)
    damped            gradients                 the same, divided by 1 + staleness
    compensated       gradients, weights read   the same, after delay compensation
    easgd             alpha (own - center)      adds it to the center
    diloco            start - end of H steps    Nesterov on averages of a quorum

Source: Dean et al., DistBelief, NeurIPS 2012; Zhang et al., arXiv:1511.05950 (damped);
  Zheng et al., arXiv:1609.08326 (compensated); Zhang et al., EASGD, arXiv:1412.6651;
  Douillard et al., DiLoCo, arXiv:2311.08105; Liu et al., Asynchronous Local-SGD,
  arXiv:2401.09135.
"""

import dataclasses
import importlib.util
from typing import Annotated

from meshpar.collectives.compression import Wire
from meshpar.errors import MeshparError
from meshpar.islands.consistency import SSP, Consistency
from meshpar.islands.managed import KEY_BYTES, ORDERS
from meshpar.islands.push_filters import Filters, PushFilter, check_order
from meshpar.layouts.refusals.combination import ModeTraits
from meshpar.settings import LARGEST, Choice, Instance, Number, Switch, check, real

GRADIENTS = ("downpour", "damped", "compensated")
"""Algorithms that push gradients; the optimizer runs in the store."""

WEIGHTS = ("easgd", "diloco")
"""Algorithms whose islands run an optimizer of their own."""

SERVER_OPTIMIZERS = ("adagrad", "adam", "sgd")
"""Optimizers of the store by name."""

HOSTS = ("threads", "ray")
"""Hosts by name: threads of this process, or actors in processes of their own."""

_STEPS = Number(1, 2**24, "steps")
_QUORUM = Number(0, 2**16, "islands", "0 for the rule of the consistency")
_BUDGET = Number(0, 2**40, "bytes", "0 for no limit")
_MODELS = Instance(Consistency, "BSP(), SSP(s), ASP() or BoundedDelay(tau)")


def need_ray() -> None:
    """Raises MeshparError if Ray is not installed; with the remedy."""
    if importlib.util.find_spec("ray") is None:
        raise MeshparError(
            'islands: host=ray needs Ray: pip install "meshpar[islands]"'
        )


@dataclasses.dataclass(frozen=True)
class Islands:
    """Islands: how many, what they push, and how far apart they may be.

    Attributes:
      workers: number of islands; each trains under the layout, on devices of its own.
      algorithm: "downpour", "damped" (by staleness) and "compensated" (for delay) push
        gradients; "easgd" and "diloco" push differences of weights.
      consistency: how far islands may run apart: "bsp" waits in every step, "ssp:S" and
        "bounded_delay:TAU" within a bound, "asp" never.
      fetch: steps between pulls (Downpour's n_fetch).
      push: steps between pushes (Downpour's n_push; tau of EASGD; H of DiLoCo).
      server_optimizer: optimizer of the store, where islands push gradients.
      learning_rate: learning rate of the store; with diloco that of the outer
        optimizer.
      momentum: momentum of the store's "sgd", and of the outer optimizer of diloco.
      local_learning_rate: learning rate with which an island moves its own copy of the
        weights between pulls, where it pushes gradients.
      alpha: share of the way that easgd moves an island and the center towards each
        other.
      compensation: strength of the correction of old gradients in compensated.
      warm_start: steps that the first island trains alone at the start.
      quorum: islands whose pushes make an average; 0 for the consistency's own rule.
      grace: seconds that an average waits for more islands after its quorum is there.
      wire: format of pushes: "f32", "bf16", "int8", "int4" or "topk:FRACTION".
      error_feedback: whether the error of a lossy format, or what filters leave out, is
        added to the next push.
      servers: number of servers of the store.
      replicas: number of servers that hold a copy of each range of weights.
      ranges: parts into which the weights are cut, spread over the servers.
      host: where islands run: "threads" of this process, or "ray" for processes of
        their own.
      budget: bytes of a push of gradients, for keys and numbers; the largest updates go
        first and the others wait. 0 for no limit.
      order: which updates a push takes first where `budget` is too small for all.
      own_data: whether island i trains on the i-th part of every batch, and on no
        other; else a part goes to the island that is free next.
      history: older versions of its weights that the store keeps, for readers that want
        one version of all ranges while islands train (`program.reader`).
      filters: numbers of pushes that are left out or packed, in order: "significant:T",
        "relative:T", "skip:P" and "zlib".

    Raises:
      MeshparError: settings that contradict each other.
    """

    workers: Annotated[int, Number(1, 2**16, "islands")] = 2
    algorithm: Annotated[str, Choice(GRADIENTS + WEIGHTS)] = "downpour"
    consistency: Annotated[Consistency, _MODELS] = SSP(1)
    fetch: Annotated[int, _STEPS] = 1
    push: Annotated[int, _STEPS] = 1
    server_optimizer: Annotated[str, Choice(SERVER_OPTIMIZERS)] = "adagrad"
    learning_rate: Annotated[float, real(0, LARGEST)] = 0.02
    momentum: Annotated[float, real(0, 1, below=True)] = 0.9
    local_learning_rate: Annotated[float, real(0, LARGEST)] = 0.01
    alpha: Annotated[float, real(0, 1)] = 0.1
    compensation: Annotated[float, real(0, 1e6)] = 0.04
    warm_start: Annotated[int, Number(0, 2**24, "steps")] = 0
    quorum: Annotated[int, _QUORUM] = 0
    grace: Annotated[float, real(0, 1e6, "seconds")] = 0.0
    wire: Annotated[str, Wire()] = "f32"
    error_feedback: Annotated[bool, Switch()] = True
    servers: Annotated[int, Number(1, 2**12, "servers")] = 1
    replicas: Annotated[int, Number(1, 2**12, "servers")] = 1
    ranges: Annotated[int, Number(1, 2**16, "ranges")] = 4
    host: Annotated[str, Choice(HOSTS)] = "threads"
    budget: Annotated[int, _BUDGET] = 0
    order: Annotated[str, Choice(ORDERS)] = "magnitude"
    own_data: Annotated[bool, Switch()] = False
    history: Annotated[int, Number(0, 2**12, "versions")] = 0
    filters: Annotated[tuple[PushFilter, ...], Filters()] = ()

    def __post_init__(self):
        check(self, "islands: ")
        if self.quorum > self.workers:
            raise MeshparError(
                f"islands: quorum={self.quorum} of {self.workers} workers: use 0 to "
                f"{self.workers}"
            )
        if self.replicas > self.servers:
            raise MeshparError(
                f"islands: replicas={self.replicas} on {self.servers} server(s): use "
                "at least as many servers"
            )
        self._check_budget()
        self._check_filters()
        if self.own_data and self.warm_start:
            raise MeshparError(
                f"islands: warm_start={self.warm_start} with own_data: the first "
                "island would wait for parts that others own; leave one of them out"
            )
        if self.algorithm in WEIGHTS and self.fetch not in (1, self.push):
            raise MeshparError(
                f"islands: fetch={self.fetch} with {self.algorithm}: it pulls when it "
                "pushes; leave it out"
            )
        if self.algorithm == "diloco" and not (self.in_rounds):
            raise MeshparError(
                f"islands: diloco with {self.consistency} averages pushes: set a quorum"
            )
        if self.algorithm == "easgd" and self.in_rounds:
            raise MeshparError(
                f"islands: easgd with {self.consistency} and quorum={self.quorum}: its "
                "center takes every push by itself; use asp, or ssp:S with S > 0"
            )
        if self.algorithm == "compensated" and (self.in_rounds or self.push > 1):
            raise MeshparError(
                "islands: compensated corrects single gradients: use push=1 and a "
                "consistency without averages (asp, or ssp:S with S > 0)"
            )

    def _check_budget(self) -> None:
        if not self.budget:
            return
        if self.budget < KEY_BYTES:
            raise MeshparError(
                f"islands: budget={self.budget}: a number and its key take {KEY_BYTES} "
                "bytes; use as many at least, or 0 for no limit"
            )
        if self.algorithm not in ("downpour", "damped") or self.wire != "f32":
            raise MeshparError(
                f"islands: budget={self.budget} with {self.algorithm} and "
                f"wire={self.wire}: numbers of a push can wait where they are sums of "
                "gradients; use downpour or damped, and wire=f32"
            )

    def _check_filters(self) -> None:
        check_order(self.filters)
        if self.filters and (self.budget or self.wire != "f32"):
            raise MeshparError(
                f"islands: filters={self.filters} with budget={self.budget} and "
                f"wire={self.wire}: each of them says what a push sends; use one alone"
            )
        if self.filters and self.algorithm == "compensated":
            raise MeshparError(
                f"islands: filters={self.filters} with compensated, which corrects "
                "whole gradients: use downpour or damped"
            )

    @property
    def in_rounds(self) -> bool:
        """Whether the store applies averages of pushes."""
        return bool(self.quorum) or self.consistency.in_rounds

    @property
    def traits(self) -> ModeTraits:
        """Facts of the mode at which the table of refusals looks."""
        return ModeTraits("Islands", has_replicas=False, several_programs=False)

    def identity(self) -> str:
        """The mode as text; the host, the servers and who owns data may change."""
        left_out = {"host", "servers", "replicas", "grace", "own_data"}
        if not self.budget:
            left_out |= {"budget", "order"}
        left_out |= {name for name in ("filters", "history") if not getattr(self, name)}
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in left_out
        }
        return f"islands {values}"
