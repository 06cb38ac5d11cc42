"""The programs whose predictions are compared with compilers' figures."""

import dataclasses
import itertools
import re

import meshpar
from experiments import recipes
from experiments.recipes.config import Config
from meshpar import mesh
from meshpar.errors import ConfigError
from meshpar.runs.config import with_settings


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile.

    Attributes:
      recipe: name of a recipe, then settings such as "model.length=2048".
      topology: machine that it is compiled for.
      batch_size: sequences of a batch.
      layout: layout string.
    """

    recipe: str
    topology: str
    batch_size: int
    layout: str

    def __str__(self):
        return f"{self.recipe}, {self.topology}, {self.batch_size}, {self.layout}"

    @property
    def config(self) -> Config:
        """The configuration."""
        recipe, *settings = self.recipe.split()
        config = with_settings(recipes.get(recipe), settings)
        return dataclasses.replace(config, batch_size=self.batch_size)

    def program(self) -> meshpar.TrainProgram:
        """The lowered program."""
        devices = mesh.topology(self.topology)
        layout = meshpar.layouts.parse(self.layout)
        return self.config.make_program(layout, devices)


PADDED = "gpt2-124m model.vocab=50304"
"""GPT-2 with a vocabulary that `tensor` and `vocab=pipe` can split."""

_LLAMA2 = "llama2-7b model.length=2048"
_SIZES = (
    "data=8",
    "data=4,fsdp=2",
    "data=2,fsdp=4",
    "fsdp=8",
    "data=4,tensor=2",
    "data=2,fsdp=2,tensor=2",
    "fsdp=4,tensor=2",
    "data=2,tensor=4",
    "fsdp=2,tensor=4",
)
_EXHAUSTIVE = "llama-1b", "v5p:2x2x2", 16
_EVERY_SIZE = tuple(
    f"{sizes},remat={remat}"
    for sizes, remat in itertools.product(_SIZES, ("none", "dots", "full"))
)

_CASES = (
    (
        "gpt2-124m",
        "v5e:2x4",
        32,
        (
            "fsdp=8,remat=full",
            "fsdp=8,remat=dots",
            "data=8",
            "fsdp=8,microbatches=4",
            "fsdp=8,zero=2,remat=full",
            "fsdp=2,tensor=4,params.vocab=none,activations.vocab=none",
        ),
    ),
    (PADDED, "v5e:2x4", 32, ("fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2,remat=full")),
    (PADDED, "v5e:2x2", 16, ("tensor=4",)),
    (
        "gpt2-124m",
        "v5p:2x2x1",
        32,
        ("fsdp=4", "pipe=2,fsdp=2,microbatches=4", "fsdp=4,remat=full"),
    ),
    ("gpt2-124m", "v6e:2x2", 32, ("fsdp=4,remat=full",)),
    ("gpt2-124m", "v5e:4x4", 64, ("pipe=4,fsdp=4,microbatches=8,remat=full",)),
    (
        "gpt2-124m",
        "v5e:2x4",
        64,
        (
            "pipe=4,data=2,microbatches=8,schedule=gpipe,remat=full",
            "pipe=4,data=2,microbatches=8,schedule=interleaved,virtual_stages=3",
            "pipe=4,data=2,microbatches=8,schedule=zb_h1",
            "pipe=2,data=4,microbatches=4,save=residuals,remat=full",
            "pipe=4,fsdp=2,microbatches=8,zero=1",
            "pipe=4,fsdp=2,microbatches=8,zero=3",
            "pipe=2,fsdp=4,microbatches=4",
        ),
    ),
    (PADDED, "v5e:2x4", 64, ("pipe=2,fsdp=4,microbatches=4,vocab=pipe",)),
    (
        "llama-1b",
        "v5e:2x4",
        16,
        (
            "fsdp=8,remat=full",
            "fsdp=8,remat=dots",
            "fsdp=2,tensor=4,remat=full",
            "fsdp=4,tensor=2,remat=dots",
            "data=2,fsdp=4,remat=full",
        ),
    ),
    ("llama-1b", "v5e:2x4", 8, ("fsdp=8",)),
    (
        "llama-1b",
        "v5e:2x4",
        32,
        (
            "pipe=2,fsdp=4,microbatches=8,remat=full",
            "pipe=2,data=4,microbatches=8,remat=full",
            "pipe=2,fsdp=2,tensor=2,microbatches=8,remat=full",
            "pipe=2,fsdp=4,microbatches=4,remat=dots",
        ),
    ),
    (
        "llama-1b",
        "v5p:2x2x1",
        32,
        (
            "fsdp=4,zero=2,remat=full",
            "fsdp=4,zero=1,remat=full",
            "data=4,remat=full",
            "pipe=2,fsdp=2,microbatches=4,zero=1,vocab=edge,remat=dots",
        ),
    ),
    (
        "llama-1b",
        "v6e:2x4",
        32,
        ("fsdp=4,tensor=2,remat=full", "fsdp=8,remat=dots", "data=8,remat=full"),
    ),
    (
        "llama-1b",
        "v5p:2x2x2",
        16,
        (
            "fsdp=4,context=2,remat=full",
            "fsdp=4,context=2,params.embed=fsdp+context,remat=full",
        ),
    ),
    (
        "llama-1b model.length=8192",
        "v5p:2x2x2",
        8,
        (
            "fsdp=4,context=2,remat=full",
            "fsdp=4,context=2,params.embed=fsdp+context,remat=full",
        ),
    ),
    (*_EXHAUSTIVE, _EVERY_SIZE),
    (
        "llama-1b",
        "v5p:2x2x2",
        16,
        (
            "fsdp=4,tensor=2,remat=full,layers=fsdp",
            "fsdp=4,tensor=2,remat=full,layers=11*tensor+11*fsdp",
            "fsdp=2,tensor=4,remat=full,layers=fsdp",
        ),
    ),
    (
        "llama-1b",
        "v5e:2x4",
        16,
        (
            "fsdp=2,tensor=4,remat=dots,layers=fsdp",
            "fsdp=4,tensor=2,remat=full,layers=8*fsdp+14*tensor",
        ),
    ),
    ("llama-1b", "v5p:2x2x2", 8, ("fsdp=4,tensor=2,layers=fsdp",)),
    (
        PADDED,
        "v5e:2x4",
        32,
        ("fsdp=4,tensor=2,layers=fsdp", "fsdp=2,tensor=4,layers=6*tensor+6*fsdp"),
    ),
    (
        _LLAMA2,
        "v5e:4x4",
        16,
        (
            "fsdp=16,remat=full",
            "fsdp=4,tensor=4,remat=full",
            "fsdp=4,tensor=4,remat=full,layers=fsdp",
            "fsdp=4,tensor=4,remat=full,layers=16*tensor+16*fsdp",
        ),
    ),
    (_LLAMA2, "v5e:8x8", 64, ("fsdp=16,tensor=4,remat=full",)),
    (_LLAMA2, "v6e:4x4", 32, ("fsdp=16,remat=full",)),
    (
        _LLAMA2,
        "v5p:4x4x2",
        128,
        ("fsdp=32,remat=full", "fsdp=8,tensor=4,remat=full"),
    ),
    (
        _LLAMA2,
        "v5p:4x4x2",
        64,
        (
            "pipe=4,fsdp=2,tensor=4,microbatches=8,zero=1,vocab=edge,save=inputs,"
            "remat=full",
        ),
    ),
    (
        _LLAMA2,
        "v5e:2x4",
        16,
        (
            "fsdp=8,remat=full,offload=optimizer",
            "fsdp=8,remat=full,offload=optimizer,microbatches=2",
        ),
    ),
    (
        "llama2-7b model.length=32768",
        "v5p:4x4x4",
        16,
        ("fsdp=16,context=4,remat=full",),
    ),
    (
        "llama2-7b model.length=32768 model.loss_block=1024",
        "v5p:4x4x4",
        16,
        ("fsdp=16,context=4,params.embed=fsdp+context,remat=full",),
    ),
    (
        "mixtral-8x7b model.length=2048",
        "v5p:4x4x4",
        64,
        ("fsdp=16,expert=4,remat=full",),
    ),
    (
        "gpt3-175b",
        "8*v5p:8x8x4",
        1536,
        (
            "data=8,fsdp=64,tensor=4,remat=dots,params.vocab=none,"
            "activations.vocab=none",
        ),
    ),
    (
        "gpt2-124m",
        "h100:8",
        64,
        ("fsdp=8,remat=full", "data=8,remat=dots", "fsdp=8,zero=2"),
    ),
    (
        "llama-1b",
        "h100:8",
        32,
        (
            "fsdp=8,remat=full",
            "fsdp=8,remat=dots",
            "data=8,remat=full",
            "fsdp=4,tensor=2,remat=full",
            "pipe=2,fsdp=4,microbatches=8,zero=1,vocab=edge,save=inputs,remat=full",
        ),
    ),
    (_LLAMA2, "h100:8", 16, ("fsdp=8,remat=full", "fsdp=2,tensor=4,remat=full")),
)
CASES = tuple(
    Case(recipe, topology, batch_size, layout)
    for recipe, topology, batch_size, layouts in _CASES
    for layout in layouts
)
"""Programs whose predictions are held against the compilers."""

EXHAUSTIVE = tuple(Case(*_EXHAUSTIVE, layout) for layout in _EVERY_SIZE)
"""All sizes of data, fsdp and tensor over 8 chips, with every uniform `remat`."""


def matching(regex: str) -> list[Case]:
    """The cases whose line matches a regex.

    Raises:
      ConfigError: there is none.
    """
    found = [case for case in CASES if re.search(regex, str(case))]
    if not found:
        raise ConfigError(
            f"--only={regex} matches no program; programs are lines such as "
            f"{str(CASES[0])!r}"
        )
    return found
