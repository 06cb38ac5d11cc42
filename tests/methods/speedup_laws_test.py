"""The laws of speedup: fits find what was planted, and refuse what they cannot fit."""

import math

import pytest

from experiments.gallery import scaling
from meshpar.errors import MeshparError
from meshpar.methods import speedup_laws


@pytest.mark.parametrize("sigma, kappa", [(0, 0), (0.1, 0), (0.02, 2e-4), (0, 1e-3)])
def test_gunthers_fit_finds_what_was_planted(sigma, kappa):
    law = speedup_laws.Strong(3.0, sigma, kappa)
    found = speedup_laws.fit_gunther({n: law.seconds(n) for n in (2, 3, 8, 50)})
    assert found.one_device == pytest.approx(3.0, rel=1e-9)
    assert found.sigma == pytest.approx(sigma, rel=1e-6, abs=1e-9)
    assert found.kappa == pytest.approx(kappa, rel=1e-6, abs=1e-9)


def test_the_other_fits_find_what_was_planted():
    amdahl, weak = speedup_laws.Strong(3.0, 0.03), speedup_laws.Weak(3.0, 0.2)
    found = speedup_laws.fit_amdahl({n: amdahl.seconds(n) for n in (4, 16)})
    assert (found.one_device, found.sigma) == pytest.approx((3.0, 0.03))
    found = speedup_laws.fit_gustafson({n: weak.seconds(n) for n in (4, 16)})
    assert (found.one_device, found.serial) == pytest.approx((3.0, 0.2))


def test_what_follows_from_the_shares():
    law = speedup_laws.Strong(1.0, 0.01)
    assert (law.limit, law.half_devices) == pytest.approx((100, 99))
    assert law.speedup(99) == pytest.approx(50)
    assert law.best_devices == math.inf == speedup_laws.Strong(1.0, 0.0).limit
    assert speedup_laws.Weak(1.0, 0.1).speedup(11) == pytest.approx(10)
    grown = speedup_laws.Strong(1.0, 0.02, 2e-4)
    assert grown.best_devices == pytest.approx(70)
    assert max(map(grown.speedup, range(1, 1000))) == grown.limit


def test_times_that_cannot_be_fitted():
    with pytest.raises(MeshparError, match=r"\[1, 2\] devices: .* at least 3"):
        speedup_laws.fit_gunther({1: 1.0, 2: 0.5})
    with pytest.raises(MeshparError, match="0.0 seconds with 2 devices"):
        speedup_laws.fit_amdahl({1: 1.0, 2: 0.0})
    with pytest.raises(MeshparError, match="grow with the square"):
        speedup_laws.fit_gunther({n: float(n - 1) for n in (2, 3, 4)})


def test_the_gallery_finds_what_was_planted_and_sees_a_wrong_fit(monkeypatch):
    claims = scaling.recovery_claims((0, 1, 2))
    assert [claim.text for claim in claims if not claim.holds] == []
    monkeypatch.setattr(speedup_laws, "fit_gunther", speedup_laws.fit_amdahl)
    failed = [claim for claim in scaling.recovery_claims((0,)) if not claim.holds]
    assert len(failed) == 2
