"""Pipeline schedules as data: tables of ticks, made and checked without jax."""

from meshpar.schedules.check import problems as problems
from meshpar.schedules.fused import gpipe as gpipe
from meshpar.schedules.fused import interleaved as interleaved
from meshpar.schedules.fused import one_f_one_b as one_f_one_b
from meshpar.schedules.fused import pipedream as pipedream
from meshpar.schedules.published import PUBLISHED as PUBLISHED
from meshpar.schedules.published import SCHEDULES as SCHEDULES
from meshpar.schedules.published import formula as formula
from meshpar.schedules.published import make_schedule as make_schedule
from meshpar.schedules.published import register as register
from meshpar.schedules.table import Op as Op
from meshpar.schedules.table import Schedule as Schedule
from meshpar.schedules.ticks import Tables as Tables
from meshpar.schedules.ticks import compile_schedule as compile_schedule
from meshpar.schedules.zero_bubble import ZERO_BUBBLE as ZERO_BUBBLE
from meshpar.schedules.zero_bubble import dualpipe_v as dualpipe_v
from meshpar.schedules.zero_bubble import in_lock_step as in_lock_step
from meshpar.schedules.zero_bubble import zb_h1 as zb_h1
from meshpar.schedules.zero_bubble import zb_h2 as zb_h2
from meshpar.schedules.zero_bubble import zb_v as zb_v
