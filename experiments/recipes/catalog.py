"""All recipes by name (`--recipe`), and the layout of runs that name none."""

from collections.abc import Callable

from experiments.recipes import mixtures, published, small
from experiments.recipes.config import Config
from experiments.recipes.errors import ConfigError
from meshpar.errors import nearest
from meshpar.layouts.axes import DATA, FSDP, TENSOR

RECIPES: dict[str, Callable[[], Config]] = {
    **small.RECIPES,
    **published.RECIPES,
    **mixtures.RECIPES,
}


def get(name: str) -> Config:
    """Returns the configuration of a recipe.

    Raises:
      ConfigError: there is no such recipe; lists those that exist.
    """
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r} ({nearest(name, RECIPES)})")
    return RECIPES[name]()


def default_layout(num_devices: int) -> str:
    """A layout that fills the devices with tensor=2, fsdp=2 and the rest data.

    An axis gets 2 devices only while the number that is left is even.
    """
    sizes, left = {TENSOR: 1, FSDP: 1}, num_devices
    for axis in sizes:
        if left % 2 == 0:
            sizes[axis], left = 2, left // 2
    return ",".join(
        f"{axis}={size}"
        for axis, size in ((DATA, left), (FSDP, sizes[FSDP]), (TENSOR, sizes[TENSOR]))
    )
