"""Functions of a decoder's configuration under their former names.

They are methods of `experiments.recipes.config.Config` now. The names here go with the
next version.
"""

import warnings

from experiments.recipes.config import Config
from experiments.recipes.optimizers import learning_rates as learning_rates
from experiments.recipes.optimizers import make_optimizer as make_optimizer
from meshpar.runs.programs import compute_dtype as compute_dtype

warnings.warn(
    "experiments.recipes.building: use the methods of the configuration, as in "
    "config.make_program(layout, devices)",
    DeprecationWarning,
    stacklevel=2,
)

abstract_batch = Config.abstract_batch
fit_vocabulary = Config.fitted
make_model = Config.make_model
make_program = Config.make_program
