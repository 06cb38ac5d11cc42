"""Markov-chain Monte Carlo search over the states of a mesh.

A chain proposes another option for one choice, for two, or for all of a kind, and takes
the proposal with probability min(1, exp(-beta * (new - old))) of their costs. A chain
ends with its budget, or when half of its budget has found nothing better. The best
state of all chains is tidied: each kind takes one option for all of its choices, where
that costs next to nothing.

States that need more memory than there is cost more than all that fit, by what they
lack; a state that no layout can be is never taken, unless all before it were such too.

Source: Jia et al., arXiv:1807.05358, section 6 (MCMC sampling and search).
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from meshpar.methods.flexflow.choices import Choice, State

ILLEGAL = math.inf
"""Cost of a state that no layout can be."""

_KINDS, _PAIRS = 0.5, 0.2
"""Shares of the proposals that change all choices of a kind together, and two choices:
columns of one matmul and rows of the next pay only together."""

_WORSE = 0.2
"""A proposal that is worse by this share of the least cost is taken 1 time in e."""


_TIDY = 0.002
"""Share of the cost that a tidy state may cost more."""


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
          budget: most proposals of one chain, and of tidying.
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
        """The best state of the chains from some states, tidied."""
        found = self.chains(starts)
        state, cost, tried = found.state, found.cost, 0
        for group in sorted(self._kinds, key=len, reverse=True):
            for option in range(len(self.choices[group[0]].options)):
                new = _changed(state, group, option)
                if new == state or tried == self.budget:
                    continue
                tried += 1
                mixed = len({state[index] for index in group}) > 1
                bound = cost * (1 + _TIDY) if mixed else cost
                price = self.cost(new)
                if price < bound or (price == cost < ILLEGAL and not option):
                    state, cost = new, price
        return Found(state, cost, found.proposals + tried)

    def chains(self, starts: Sequence[State]) -> Found:
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
        """Another option for one choice, for two, or for all of a kind."""
        draw = self._random.random()
        if draw < _KINDS:
            return self._redrawn(state, self._random.choice(self._kinds))
        for _ in range(1 + (draw < _KINDS + _PAIRS)):
            state = self._redrawn(state, [self._random.choice(self._open)])
        return state

    def _redrawn(self, state: State, group: Sequence[int]) -> State:
        """A neighbour of a state: a choice, or a group of them, has another option."""
        options = len(self.choices[group[0]].options)
        if len(group) > 1:
            return _changed(state, group, self._random.randrange(options))
        other = self._random.randrange(options - 1)
        return _changed(state, group, other + (other >= state[group[0]]))


def _changed(state: State, group: Sequence[int], option: int) -> State:
    """A state with an option for all choices of a group."""
    new = list(state)
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
