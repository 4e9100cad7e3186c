"""At which ports, and on which network, the ranks of a run listen: what may be given. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polytrain.config.constraints import Wrong
from polytrain.text.described import is_whole, numbered
from polytrain_plugins import Demand, Member, Problem
from polytrain_plugins.type_names import a_type, quoted

if TYPE_CHECKING:
    from polytrain.config.configs import ScalingConfig

_LEAST_PORT, _MOST_PORT = 1024, 65535
"""Lower ones are root's."""

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")

_PORTS_EXAMPLE = 'Give a port, such as 30000, or the first and the last, such as "30000-30100"'

_NETWORK_EXAMPLE = (
    'Give the name of an interface, such as "eth1", or, where hosts have different names, a '
    'subnet, such as "10.1.0.0/16"'
)


def port_range(given: Any) -> Iterator[Wrong]:
    """Yield why these can't be the ports at which ranks listen."""
    if not isinstance(given, str) and not is_whole(given):
        yield f"it is {a_type(given)}", _PORTS_EXAMPLE
        return
    numbers = _first_and_last(given)
    if numbers is None:
        yield f"{quoted(given)} is neither a port nor a range of them", _PORTS_EXAMPLE
        return
    first, last = numbers
    wrong = [port for port in dict.fromkeys(numbers) if not _LEAST_PORT <= port <= _MOST_PORT]
    if wrong:
        why = "only root may listen there" if wrong[0] < _LEAST_PORT else "there is no such port"
        yield f"{wrong[0]}: {why}", f"Give ports from {_LEAST_PORT} to {_MOST_PORT}"
    elif first > last:
        yield f"{quoted(given)} begins after its end", f'Give "{last}-{first}"'


def ports_of(given: int | str | None) -> range | None:
    """Return the ports of `RunConfig.ports`, which is right; None for any."""
    numbers = None if given is None else _first_and_last(given)
    return None if numbers is None else range(numbers[0], numbers[1] + 1)


def _first_and_last(given: int | str) -> tuple[int, int] | None:
    if isinstance(given, int):
        return given, given
    found = _RANGE.fullmatch(given)
    return None if found is None else (int(found[1]), int(found[2] or found[1]))


def network_name(given: Any) -> Iterator[Wrong]:
    """Yield why this is neither the name of a network interface nor a subnet."""
    if not isinstance(given, str):
        yield f"it is {a_type(given)}", _NETWORK_EXAMPLE
    elif "/" in given:
        try:
            ipaddress.IPv4Network(given)
        except ValueError as error:
            yield f"{quoted(given)} is no IPv4 subnet: {error}", _NETWORK_EXAMPLE
    elif _is_address(given):
        yield f"{quoted(given)} is the address of one host", _NETWORK_EXAMPLE
    elif not re.fullmatch(r"[^\s,:/]{1,15}", given):
        yield f"{quoted(given)} names no network interface", _NETWORK_EXAMPLE


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def address_on(network: str, interfaces: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """Return a host's interface on a network, and its address there; None if it has none.

    Args:
        network: `RunConfig.network_interface`.
        interfaces: the IPv4 addresses of each of the host's interfaces.
    """
    if "/" not in network:
        addresses = interfaces.get(network)
        return (network, addresses[0]) if addresses else None
    subnet = ipaddress.IPv4Network(network)
    return next(
        (
            (name, address)
            for name, addresses in interfaces.items()
            for address in addresses
            if ipaddress.IPv4Address(address) in subnet
        ),
        None,
    )


def port_problems(
    given: int | str | None, demand: Demand, scaling: ScalingConfig, *, is_one_host: bool
) -> Iterator[Problem]:
    """Yield a problem if there are too few ports, wherever the workers are placed.

    Args:
        is_one_host: whether all workers are on one host for certain.
    """
    allowed = ports_of(given)
    is_one_host = is_one_host or scaling.placement_strategy == "STRICT_PACK"
    ranks = max(1, scaling.min_workers) if is_one_host else 1
    needed = demand.leader_ports + ranks * demand.ports
    if allowed is None or len(allowed) >= needed:
        return
    yield Problem(
        field="RunConfig.ports",
        what=f"{given!r} allows {numbered(len(allowed), 'port')}, and one host with "
        f"{numbered(ranks, 'rank')} needs {needed}",
        remedy=f"Allow at least {needed}, such as {_wider(allowed, needed)!r}",
    )


def too_few_ports(given: int | str | None, demand: Demand, members: Sequence[Member]) -> str | None:
    """Return why ranks that have their places can't all listen; None if they can."""
    allowed = ports_of(given)
    if allowed is None:
        return None
    for first in (member for member in members if member.local_rank == 0):
        needed = first.local_world_size * demand.ports
        needed += demand.leader_ports * (first.node_rank == 0)
        if needed > len(allowed):
            return (
                f"RunConfig(ports={given!r}) allows {numbered(len(allowed), 'port')}, and "
                f"{first.host} with {numbered(first.local_world_size, 'rank')} needs {needed}. "
                f"Allow at least {needed}, such as {_wider(allowed, needed)!r}, or place fewer "
                'workers on a host with ScalingConfig(placement_strategy="SPREAD")'
            )
    return None


def _wider(allowed: range, needed: int) -> str:
    first = min(allowed[0], 65536 - needed)
    return f"{first}-{first + needed - 1}"
