"""Names that a model uses and that nothing binds: axes of pmap, random streams.

Public models reduce over the axis name of a `jax.pmap` around them, or draw random
numbers in evaluation as well.
"""

import contextlib
import re
from collections.abc import Iterator

from flax.errors import InvalidRngError

from meshpar.errors import MeshparError


@contextlib.contextmanager
def explained_names() -> Iterator[None]:
    """Turns errors of jax and Flax about names that are not bound into ours.

    Raises:
      MeshparError: the model uses such a name.
    """
    try:
        yield
    except NameError as error:
        if not (found := re.search(r"unbound axis name: (\w+)", str(error))):
            raise
        name = found[1]
        raise MeshparError(
            f"the model reduces over the axis name {name!r}, as under jax.pmap: leave "
            f"it out of the model (jax.lax.pmean, or axis_name={name!r} of BatchNorm), "
            f"or give axis_name={name!r} to from_linen or from_nnx. Under jit without "
            "microbatches a model sees the whole batch at once"
        ) from error
    except InvalidRngError as error:
        if not (found := re.search(r'needs PRNG for "(\w+)"', str(error))):
            raise
        name = found[1]
        raise MeshparError(
            f"the model draws random numbers of the stream {name!r}, which it is not "
            f"given: name it in from_linen(rngs=({name!r},)). Evaluation has no random "
            "keys: give an evaluation_module that draws none, or an evaluation_loss_fn "
            f"that passes rngs={{{name!r}: key}} to apply"
        ) from error
