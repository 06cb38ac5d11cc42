"""Islands: workers that train at their own pace against a store of parameters."""

from meshpar.islands.consistency import ASP as ASP
from meshpar.islands.consistency import BSP as BSP
from meshpar.islands.consistency import SSP as SSP
from meshpar.islands.consistency import BoundedDelay as BoundedDelay
from meshpar.islands.key_range import Contribution as Contribution
from meshpar.islands.key_range import KeyRange as KeyRange
from meshpar.islands.key_range import split as split
from meshpar.islands.messages import Payload as Payload
from meshpar.islands.mode import Islands as Islands
from meshpar.islands.push_filters import PushFilter as PushFilter
from meshpar.islands.push_filters import Turn as Turn
from meshpar.islands.rules import RefusedError as RefusedError
from meshpar.islands.store import Store as Store
