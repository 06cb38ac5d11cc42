"""Chain replication: messages between servers may overtake each other."""

import numpy as np

from meshpar.islands import ASP, KeyRange, Payload, updates
from meshpar.islands.messages import (
    Acked,
    Adopt,
    Forward,
    Install,
    Join,
    Push,
    Request,
    View,
)
from meshpar.islands.node import Node
from meshpar.islands.rules import Rules

RANGE = KeyRange("w", 2)
VIEW = View(1, {"w": ("head", "tail")}, {})


def servers():
    """The two servers of a range, in place; messages are delivered by the test."""
    head, tail = (Node(n, [RANGE], Rules(ASP(), updates.add)) for n in ("head", "tail"))
    tail.handle(Adopt(VIEW))
    (install,) = (s.message for s in head.handle(Adopt(VIEW)))
    assert isinstance(install, Install)
    (installed,) = (s.message for s in tail.handle(install))
    head.handle(installed)
    return head, tail


def test_an_operation_that_overtakes_another_one_is_kept_until_its_turn():
    head, tail = servers()
    ones = Payload((None, np.ones(2, np.float32)))
    operations = [Join("w", "a", 0), Push("w", "a", 0, ones), Push("w", "a", 1, ones)]
    forwards = []
    for number, operation in enumerate(operations):
        forwards += head.handle(Request("client", number, 1, operation))
    first, second, third = (send.message for send in forwards)
    assert isinstance(third, Forward)
    assert tail.handle(third) == tail.handle(second) == []
    (acked,) = (send.message for send in tail.handle(first))
    assert acked == Acked(1, "w", 3)
    assert [done.message.request for done in head.handle(acked)] == [0, 1, 2]
    np.testing.assert_array_equal(tail.state("w").values, [2, 2])
