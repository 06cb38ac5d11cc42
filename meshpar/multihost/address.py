"""The coordinator's address: host and port, and where process 0 listens."""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping

from meshpar.multihost.process import MissingError, MultihostError

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""jax's variable for an address to listen on other than the coordinator's."""

_BACKLOG = 1024


class PortTakenError(MultihostError):
    """Another program listens at the coordinator's port; another port may be free."""

    exit_code = 74


def parse(coordinator: str) -> tuple[str, int]:
    """The host and port of host:port or [IPv6 address]:port.

    Raises:
      MultihostError: the text has another form, or the port does not exist.
    """
    host, _, digits = coordinator.rpartition(":")
    bare = host.strip("[]")
    if not bare or not (digits.isascii() and digits.isdigit()) or len(digits) > 5:
        raise MultihostError(
            f"coordinator={coordinator!r}: write host:port, with a port from 1 to 65535"
        )
    if ":" in bare and host != f"[{bare}]":
        raise MultihostError(
            f"coordinator={coordinator!r}: write an IPv6 address in brackets, "
            f"[{bare}]:{digits}"
        )
    if not 1 <= int(digits) <= 65535:
        raise MultihostError(
            f"coordinator={coordinator!r}: port {digits} does not exist; use 1 to 65535"
        )
    return bare, int(digits)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _is_number(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host.partition("%")[0]))
    return False


def _resolved(host: str, port: int) -> list[tuple[int, tuple]]:
    """(family, socket address) of every address that a host has."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MissingError(
            f"the coordinator's host {host!r} has no address on this machine: {error}; "
            "check its name"
        ) from error
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def _bind(family: int, address: tuple, shared: bool) -> socket.socket:
    """A socket at an address, which it shares with our others or with nobody."""
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if shared and hasattr(socket, "SO_REUSEPORT"):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def hold(servers: list[socket.socket]) -> list[socket.socket]:
    """Keeps the ports of `servers` from other programs once they are closed.

    jax.distributed crashes if its port is taken. It shares ports, as these sockets do;
    they take no connections.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        return []
    return [_bind(s.family, s.getsockname(), shared=True) for s in servers]


def hold_another(server: socket.socket) -> socket.socket:
    """Keeps a free port at the address of `server` from other programs."""
    host, _, *scope = server.getsockname()
    return _bind(server.family, (host, 0, *scope), shared=True)


_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds before a silent connection is probed, seconds between probes, and probes."""


def notice_loss(connection: socket.socket) -> None:
    """Makes an idle connection end a minute after the other machine has gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def with_port(coordinator: str, port: int) -> str:
    """The address of a coordinator's host with another port."""
    return f"{coordinator.rpartition(':')[0]}:{port}"


def listen(
    coordinator: str, environment: Mapping[str, str] = os.environ
) -> list[socket.socket]:
    """Listens at the addresses of the coordinator's host, and at no others.

    Some machines resolve their own name to a loopback address, which other machines
    cannot reach. For such a name process 0 listens at all addresses.

    Args:
      coordinator: host:port of process 0.
      environment: may hold `BIND_VARIABLE`, an address in place of the coordinator's.

    Returns:
      One listening socket for each address.

    Raises:
      PortTakenError: another program listens there.
      MultihostError: the address is not one of this machine.
    """
    host, port = parse(environment.get(BIND_VARIABLE) or coordinator)
    addresses = _resolved(host, port)
    named = host != "localhost" and not _is_number(host)
    if named and all(_is_loopback(address[0]) for _, address in addresses):
        wide = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
        addresses = [(family, (any_host, port)) for family, any_host in wide]
    servers, errors = [], []
    for family, address in addresses:
        try:
            _bind(family, address, shared=False).close()
            servers.append(_bind(family, address, shared=True))
            servers[-1].listen(_BACKLOG)
        except OSError as error:
            errors.append(error)
    taken = [error for error in errors if error.errno == errno.EADDRINUSE]
    if servers and not taken:
        return servers
    for server in servers:
        server.close()
    if taken:
        raise PortTakenError(
            f"another program listens at {coordinator}; choose another port, or start "
            "the run again"
        ) from taken[0]
    raise MultihostError(
        f"process 0 cannot listen at {host}:{port}: {errors[0].strerror}; give the "
        "coordinator an address of the machine of process 0, or set "
        f"{BIND_VARIABLE} to the one to listen on"
    ) from errors[0]


def bound_address(servers: list[socket.socket]) -> str:
    """The address in gRPC's form at which jax.distributed listens after `servers`."""
    host, port = servers[-1].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
