"""Rules for the rate of large batches."""

import numpy as np
import pytest

from meshpar.errors import MeshparError
from meshpar.methods import batch_rules


def test_the_rate_follows_the_rows_or_their_root():
    assert batch_rules.linear(0.1, 8192, 256) == pytest.approx(3.2)  # Goyal et al.
    assert batch_rules.root(0.1, 1024, 256) == pytest.approx(0.2)
    assert batch_rules.linear(0.1, 64, 256) == pytest.approx(0.025)


def test_a_rate_is_warmed_up_in_equal_parts_and_then_stays():
    rate = batch_rules.warmed_up(3.2, 4, start=0.0)
    np.testing.assert_allclose([rate(t) for t in range(6)], [0.8, 1.6, 2.4] + [3.2] * 3)
    from_base = batch_rules.warmed_up(3.0, 2, start=1.0)
    np.testing.assert_allclose([from_base(t) for t in range(3)], [2, 3, 3])
    np.testing.assert_allclose(batch_rules.warmed_up(0.5, 0)(0), 0.5)


@pytest.mark.parametrize("rule", [batch_rules.linear, batch_rules.root])
@pytest.mark.parametrize("wrong", [(0.0, 8, 8), (0.1, 0, 8), (0.1, 8, 0)])
def test_what_is_not_positive_is_refused(rule, wrong):
    with pytest.raises(MeshparError, match="all must be positive"):
        rule(*wrong)
