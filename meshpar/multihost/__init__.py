"""Runs of several processes: rank, start, agreement and watchdog."""

from meshpar.multihost.agree import allgather_objects as allgather_objects
from meshpar.multihost.agree import broadcast as broadcast
from meshpar.multihost.agree import check_fingerprint as check_fingerprint
from meshpar.multihost.agree import make_any_process as make_any_process
from meshpar.multihost.joining import Membership as Membership
from meshpar.multihost.joining import initialize as initialize
from meshpar.multihost.process import MissingError as MissingError
from meshpar.multihost.process import MultihostError as MultihostError
from meshpar.multihost.process import ProcessInfo as ProcessInfo
from meshpar.multihost.process import process_info as process_info
from meshpar.multihost.watchdog import HUNG as HUNG
from meshpar.multihost.watchdog import Watchdog as Watchdog
