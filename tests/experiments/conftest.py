"""A text and a run that the tests of commands share."""

import numpy as np
import pytest
from support.tiny_runs import config, losses, train


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A small text with plenty of structure."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    rng = np.random.default_rng(0)
    words = ["alpha ", "beta ", "gamma ", "delta "]
    path.write_text("".join(rng.choice(words, 20_000)))
    return str(path)


@pytest.fixture(scope="session")
def unbroken(text, tmp_path_factory):
    """Losses of a run that nothing disturbed, and its folder."""
    workdir = tmp_path_factory.mktemp("unbroken")
    assert train(config(text, workdir, sample_tokens=5)) == 0
    return losses(workdir), workdir
