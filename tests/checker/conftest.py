"""The checker looks for the user's lines among all callers of an operation."""

import jax
import pytest

_CALLERS = 10  # By default.


@pytest.fixture(autouse=True)
def _all_callers():
    kept = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", _CALLERS)
    yield
    jax.config.update("jax_traceback_in_locations_limit", kept)
