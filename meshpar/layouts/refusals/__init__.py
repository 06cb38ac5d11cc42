"""The table of refusals: what does not go together, why, and the remedy.

One record for each cause: of a layout by itself, beside a model, a lowering, a schedule
or a mode, and of generation. Sizes play no part: a dim that does not divide is refused
by the plan. `reasons` reads the table.
"""

from meshpar.layouts.refusals.of_generation import OF_GENERATION as OF_GENERATION
from meshpar.layouts.refusals.of_layouts import OF_LAYOUTS as OF_LAYOUTS
from meshpar.layouts.refusals.of_training import OF_TRAINING as OF_TRAINING
from meshpar.layouts.refusals.refusal import Refusal as Refusal

REFUSALS = (*OF_TRAINING, *OF_GENERATION)
"""The table."""
