"""Kinds of faults: each strikes a watched run once, and says in which section."""

import functools
import os
import random
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable

from experiments.faults import draws, faulty_machine, torn
from experiments.faults.draws import Fault
from experiments.faults.watched import POLL_S, WatchedRun, is_running, send, variables
from meshpar.multihost import address
from meshpar.multihost.watchdog import START

_LONGEST_PAUSE_S = 2.0
_FILE_LIMITS = (0, 4096, 1 << 16)
"""Largest sizes of files, in bytes, that stand in for a full disk."""
_SHORTLY_S = 1.0
_LONGEST_SLOW_S = 4.0
_JUMPS_S = (1, 3600, 86_400 * 400)
"""Jumps of the clock, in seconds: a correction, a time zone, a dead battery."""
_CONNECTIONS = 12
_CONNECTION_S = 0.5


def _kill(run: WatchedRun, draw: random.Random) -> str:
    """Kills one process, which the others and the supervisor notice."""
    if not (pids := run.pids()):
        return ""
    pid = pids[draw.choice(sorted(pids))]
    send(pid, signal.SIGKILL)
    return run.position()[1]  # If it was process 0, this is its last word.


def _kill_supervisor(run: WatchedRun, draw: random.Random) -> str:
    """Kills the supervisor; its processes have to end with it."""
    section = run.section()
    run.kill()
    return section


def _stop(run: WatchedRun, draw: random.Random) -> str:
    """Asks one process to end, as a cluster does before it takes a machine."""
    pids, section = run.pids(), run.section()
    if not pids:
        return ""
    send(pids[draw.choice(sorted(pids))], signal.SIGTERM)
    return section


def _pause(run: WatchedRun, draw: random.Random) -> str:
    """Suspends one process or all of them for a while."""
    pids, section = run.pids(), run.section()
    chosen = [pids[draw.choice(sorted(pids))]] if pids else []
    if draw.random() < 0.5:
        chosen = list(pids.values())
    for pid in chosen:
        send(pid, signal.SIGSTOP)
    time.sleep(draw.uniform(0, _LONGEST_PAUSE_S))
    for pid in chosen:
        send(pid, signal.SIGCONT)
    return section


def _limit_files(run: WatchedRun, size: int) -> None:
    """Sets the size up to which the run's files may grow; Python ignores SIGXFSZ."""
    for pid in run.pids().values():
        try:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        except OSError:  # It has ended.
            continue


def _full_disk(run: WatchedRun, draw: random.Random) -> str:
    """Lets no file grow: for a short time, or until the processes end."""
    section = run.section()
    run.disk_was_full = True
    _limit_files(run, draw.choice(_FILE_LIMITS))
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0, _SHORTLY_S))
        _limit_files(run, resource.RLIM_INFINITY)
    return section


def _slow_disk(run: WatchedRun, draw: random.Random) -> str:
    """Lets every file that the run opens, renames or removes take its time."""
    section = run.section()
    faulty_machine.slow_flag(run.folder).touch()
    time.sleep(draw.uniform(0, _LONGEST_SLOW_S))
    faulty_machine.slow_flag(run.folder).unlink()
    return section


def _clock_jump(run: WatchedRun, draw: random.Random) -> str:
    """Sets the clock of the day forward or back, for a short time or for good."""
    section, seconds = run.section(), draw.choice(_JUMPS_S)
    flag, size = faulty_machine.clock_flag(run.folder), draw.choice((-1, 1)) * seconds
    flag.touch()
    moved = faulty_machine.EPOCH_NS + size * 10**9
    os.utime(flag, ns=(moved, moved))
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0, _SHORTLY_S))
        flag.unlink()
    return section


def _kill_actor(run: WatchedRun, draw: random.Random) -> str:
    """Kills one process of Ray: that of an island, a server or their coordinator."""
    section, actors = run.section(), run.actors()
    if not section or not actors:
        return ""
    send(draw.choice(actors), signal.SIGKILL)
    return section


def _damaged(damage: torn.Damage, run: WatchedRun, draw: random.Random) -> str:
    """Kills all processes and damages a file before the supervisor starts them again.

    A run that has no file yet is left alone.
    """
    section, tear = run.section(), torn.choose(run.folder, damage, draw)
    if not section or tear is None:
        return ""
    send(run.supervisor, signal.SIGSTOP)
    try:
        pids = run.pids().values()
        for pid in pids:
            send(pid, signal.SIGKILL)
        while any(map(is_running, pids)):
            time.sleep(POLL_S)
        tear()
        return section
    finally:
        send(run.supervisor, signal.SIGCONT)


def _hello() -> bytes:
    """The first bytes of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(
        incoming, outgoing, server_hostname="localhost"
    )
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


_GARBAGE: tuple[Callable[[random.Random], bytes], ...] = (
    lambda draw: _hello(),
    lambda draw: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    lambda draw: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    lambda draw: b'{"process": 1, "num": 2, "challenge": "x"}\n',
    lambda draw: draw.choice((b"[]\n", b"7\n", b"9" * 5000 + b"\n", b"\n" * 100)),
    lambda draw: b"[" * 100_000,
    lambda draw: draw.randbytes(draw.randrange(1, 100_000)),
    lambda draw: b"",
)


def _garbage(run: WatchedRun, draw: random.Random) -> str:
    """Connects to the coordinator's port as strangers do, from the start on."""
    pids = run.pids()
    text = variables(pids[0]).get("MESHPAR_COORDINATOR") if 0 in pids else None
    if text is None:
        return ""
    place, section, opened = address.parse(text), "", []
    while len(opened) < _CONNECTIONS and run.section() == START:
        try:
            opened.append(socket.create_connection(place, _CONNECTION_S))
            section = START
            opened[-1].sendall(draw.choice(_GARBAGE)(draw))
            if draw.random() < 0.5:
                opened[-1].close()
        except OSError:  # Nobody listens yet, or the stranger was sent away.
            time.sleep(POLL_S)
    for connection in opened:
        connection.close()
    return section


_STRIKES: dict[str, Callable[[WatchedRun, random.Random], str]] = {
    draws.KILL: _kill,
    draws.KILL_SUPERVISOR: _kill_supervisor,
    draws.STOP: _stop,
    draws.PAUSE: _pause,
    draws.FULL_DISK: _full_disk,
    draws.SLOW_DISK: _slow_disk,
    draws.CLOCK_JUMP: _clock_jump,
    draws.KILL_ACTOR: _kill_actor,
    draws.CUT_FILE: functools.partial(_damaged, torn.cut),
    draws.FLIPPED_BIT: functools.partial(_damaged, torn.flip),
    draws.REMOVED_FILE: functools.partial(_damaged, torn.remove),
    draws.GARBAGE: _garbage,
}


def strike(run: WatchedRun, fault: Fault) -> str:
    """Strikes a run; returns the section that it was in, "" if it had just ended."""
    return _STRIKES[fault.kind](run, random.Random(fault.seed))
