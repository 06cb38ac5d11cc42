"""Draws of faults: which kind, in which section of a run, and when in it."""

import dataclasses
import random
from collections.abc import Iterator

from experiments.faults.scenarios import Scenario
from meshpar.multihost.watchdog import EVALUATION, SAVE, SECTIONS, START, STEP

KILL, KILL_SUPERVISOR, STOP, PAUSE = "kill", "kill_supervisor", "stop", "pause"
FULL_DISK, SLOW_DISK = "full_disk", "slow_disk"
CUT_FILE, FLIPPED_BIT, REMOVED_FILE = "cut_file", "flipped_bit", "removed_file"
CLOCK_JUMP, KILL_ACTOR, GARBAGE = "clock_jump", "kill_actor", "garbage"

EVERYWHERE = (KILL, KILL_SUPERVISOR, STOP, PAUSE, FULL_DISK, SLOW_DISK)
EVERYWHERE += (CUT_FILE, FLIPPED_BIT, REMOVED_FILE, CLOCK_JUMP)
"""Kinds of faults that strike every scenario in every section."""
_COPIES_OF_GARBAGE, _COPIES_OF_ACTORS = 6, 3
KINDS = (*EVERYWHERE, KILL_ACTOR, GARBAGE)
"""Kinds of faults, in the order of reports."""

_REPEATED = (STEP, EVALUATION, SAVE)
_MOST_VISITS = 4
"""A repeated section is left alone up to three times, so that a run gets further."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, before it is struck.

    Attributes:
      kind: one of `KINDS`.
      section: the section of the run that it aims at.
      visits: the section is entered this often before.
      fraction: when to strike, as a fraction of the section's usual time.
      seed: draws what else a kind has to choose: process, file, bit, duration.
    """

    kind: str
    section: str
    visits: int
    fraction: float
    seed: int


def draw_faults(seed: int, name: str, scenario: Scenario) -> Iterator[Fault]:
    """Faults without end; equal seeds give equal faults.

    They are dealt from shuffled decks that hold every kind for every section, so that
    rare sections are tried as often as others.

    Args:
      seed: of all draws.
      name: the scenario's; scenarios draw independently.
      scenario: garbage only reaches the port of one with several processes, and only
        some have actors of Ray.
    """
    draw = random.Random(f"{seed}/{name}")
    kinds = (
        *EVERYWHERE,
        *([KILL_ACTOR] * _COPIES_OF_ACTORS if scenario.actors else ()),
    )
    cards = [(kind, section) for kind in kinds for section in SECTIONS]
    if scenario.processes > 1:
        cards += [(GARBAGE, START)] * _COPIES_OF_GARBAGE
    while True:
        draw.shuffle(cards)
        for kind, section in cards:
            visits = draw.randrange(_MOST_VISITS) if section in _REPEATED else 0
            yield Fault(kind, section, visits, draw.random(), draw.getrandbits(32))
