"""The planner: the best layout for a model and a machine, without the machine."""

from meshpar.planner.plans import Plans as Plans
from meshpar.planner.plans import plan as plan
