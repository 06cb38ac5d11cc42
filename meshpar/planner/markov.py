"""Markov-chain Monte Carlo search over the states of a mesh.

A chain proposes another option for one choice, or for all choices of a kind, and takes
the proposal with probability min(1, exp(-beta * (new - old))) of their costs. Chains
start from data parallelism and from the layout's default rules. A chain ends with its
budget, or when half of its budget has found nothing better.

States that need more memory than there is cost more than all that fit, by what they
lack; a state that no layout can be is never taken, unless all before it were such too.

Source: Jia et al., arXiv:1807.05358, section 6 (MCMC sampling and search).
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from meshpar.planner.choices import Choice, State

ILLEGAL = math.inf
"""Cost of a state that no layout can be."""

_KINDS = 0.3
"""Share of the proposals that change all choices of a kind together."""

_WORSE = 0.05
"""A proposal that is worse by this share of the least cost is taken 1 time in e."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The best state of a search.

    Attributes:
      state: the state.
      cost: its cost.
      proposals: how many were made.
    """

    state: State
    cost: float
    proposals: int


class MarkovSearch:
    """Searches the states of some choices for the least cost."""

    def __init__(
        self,
        choices: Sequence[Choice],
        cost: Callable[[State], float],
        budget: int,
        seed: int = 0,
    ):
        """Prepares the search.

        Args:
          choices: what to choose.
          cost: of a state; `ILLEGAL` if it cannot be.
          budget: most proposals of one chain.
          seed: of the proposals; the same seed finds the same state.
        """
        self.choices, self.cost, self.budget = tuple(choices), cost, budget
        self._random = random.Random(seed)
        kinds: dict[tuple, list[int]] = {}
        for index, choice in enumerate(self.choices):
            if len(choice.options) > 1:
                kinds.setdefault((choice.kind, choice.options), []).append(index)
        self._kinds = list(kinds.values())
        self._open = [index for group in self._kinds for index in group]

    def run(self, starts: Sequence[State]) -> Found:
        """The best state of the chains from some states."""
        found = [self._chain(start) for start in dict.fromkeys(starts)]
        best = min(found, key=lambda f: f.cost)
        return dataclasses.replace(best, proposals=sum(f.proposals for f in found))

    def _chain(self, state: State) -> Found:
        now = self.cost(state)
        best, least, since = state, now, 0
        for number in range(self.budget if self._open else 0):
            if since > self.budget // 2:
                return Found(best, least, number)
            proposal = self._proposal(state)
            new = self.cost(proposal)
            if self._takes(now, new, least):
                state, now = proposal, new
            since += 1
            if now < least:
                best, least, since = state, now, 0
        return Found(best, least, self.budget if self._open else 0)

    def _takes(self, now: float, new: float, least: float) -> bool:
        """Metropolis' rule; beta is relative to the least cost found."""
        if new <= now:
            return True
        if new == ILLEGAL or least == 0:
            return False
        beta = 1 / (_WORSE * least)
        return self._random.random() < math.exp(-beta * (new - now))

    def _proposal(self, state: State) -> State:
        """Another option for one choice, or for all of a kind."""
        if self._random.random() < _KINDS:
            group = self._random.choice(self._kinds)
        else:
            group = [self._random.choice(self._open)]
        options = len(self.choices[group[0]].options)
        new = list(state)
        if len(group) == 1:
            other = self._random.randrange(options - 1)
            new[group[0]] = other + (other >= state[group[0]])
            return tuple(new)
        option = self._random.randrange(options)
        for index in group:
            new[index] = option
        return tuple(new)


def exhaustive(
    choices: Sequence[Choice], cost: Callable[[State], float]
) -> Iterator[tuple[float, State]]:
    """(cost, state) of every state; for graphs of few operators.

    Args:
      choices: what to choose.
      cost: of a state.
    """
    options = (range(len(choice.options)) for choice in choices)
    for state in itertools.product(*options):
        yield cost(state), state
