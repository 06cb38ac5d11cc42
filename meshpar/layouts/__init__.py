"""Layouts: axis sizes and named-dim rules, and the sharding of every leaf by them."""

from meshpar.layouts.axes import AXES as AXES
from meshpar.layouts.axes import BATCH_AXES as BATCH_AXES
from meshpar.layouts.layout import Layout as Layout
from meshpar.layouts.layout import parse as parse
from meshpar.layouts.param import Param as Param
from meshpar.layouts.plan import LeafPlan as LeafPlan
from meshpar.layouts.plan import Plan as Plan
from meshpar.layouts.rules import ACTIVATION_RULES as ACTIVATION_RULES
from meshpar.layouts.rules import PARAM_RULES as PARAM_RULES
from meshpar.layouts.scope import constrain as constrain
from meshpar.layouts.scope import remat as remat
from meshpar.layouts.scope import use as use
