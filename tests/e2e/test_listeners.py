"""Where the processes of a run on one machine listen: docs/security.md has it in a table."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.listeners import free_ports, is_loopback, listening

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain.testing.contract import kit_table
from polytrain_plugins import RunInfo, hookimpl

PAGE = Path(__file__).parents[2] / "docs" / "security.md"

BACKENDS = ("reference", "torch", "xgboost", "lightgbm", "tensorflow")

ENOUGH = 3
"""Ports that two ranks of any backend need."""


@dataclass(frozen=True, slots=True)
class Listening:
    """One socket of a rank, as the table describes it."""

    address: str
    """ "its own" or "all": at which connections are accepted."""

    port: str
    """ "`ports`" or "the system's"."""


def listed_in_docs(backend: str, rank: int) -> list[Listening]:
    """What the table says of one rank, on CPUs, once all ranks are connected."""
    rows = re.findall(rf"^\| `{backend}` \|(.+)\|$", PAGE.read_text(), re.MULTILINE)
    assert rows
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return [
        Listening(address=address, port=port)
        for process, _, address, port, _ in cells
        if process == "each rank" or process == f"rank {rank}"
    ]


def seen(found: list[tuple[str, int]], ports: range) -> list[Listening]:
    """The sockets of a process in the table's words."""
    for address, _ in found:
        assert is_loopback(address) or ipaddress.ip_address(address).is_unspecified
    return [
        Listening(
            address="all" if is_reached_at_another_address(port) else "its own",
            port="`ports`" if port in ports else "the system's",
        )
        for _, port in found
    ]


def is_reached_at_another_address(port: int) -> bool:
    """Whether one can connect to a port elsewhere than at 127.0.0.1, which ranks offer."""
    try:
        socket.create_connection(("127.0.0.2", port), timeout=0.5).close()
    except OSError:
        return False
    return True


class Lists:
    """Lists where the driver and its descendants listen while they train."""

    def __init__(self, ranks: Path, ports: range) -> None:
        self.driver: list[tuple[str, int]] = []
        self.by_process: dict[int, list[Listening]] = {}
        """Of each descendant that listens anywhere."""

        self._ranks = ranks
        self._ports = ports

    @hookimpl
    def polytrain_reported(self, run: RunInfo) -> None:
        try:
            self.driver = listening()
            children = psutil.Process().children(recursive=True)
            by_process = {each.pid: listening(each.pid) for each in children}
            self.by_process = {
                pid: seen(sockets, self._ports) for pid, sockets in by_process.items() if sockets
            }
        finally:
            # The ranks wait for it, also if this fails.
            (self._ranks / "listed").touch()


def trains_until_listed(config: dict[str, Any]) -> None:
    rank = polytrain.get_context().get_world_rank()
    (config["ranks"] / str(rank)).write_text(str(os.getpid()))
    polytrain.report({"step": 1})
    while not (config["ranks"] / "listed").exists():
        time.sleep(0.01)


def test_what_is_listed_is_where_this_process_listens() -> None:
    before = listening()
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("", 0)) as second,
    ):
        ours = [("127.0.0.1", first.getsockname()[1]), ("0.0.0.0", second.getsockname()[1])]
        assert sorted(listening()) == sorted([*before, *ours])
    assert listening() == before


def test_a_process_that_has_ended_listens_nowhere() -> None:
    ended = subprocess.Popen(["true"])
    pid = ended.pid
    ended.wait()
    assert listening(pid) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_listens_where_the_table_says(backend: str, tmp_path: Path, quiet: RunConfig) -> None:
    before, ports, ranks = listening(), free_ports(ENOUGH), tmp_path / "ranks"
    ranks.mkdir()
    found = Lists(ranks, ports)
    make_trainer(
        backend,
        trains_until_listed,
        train_loop_config={"ranks": ranks},
        datasets={"train": kit_table()},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=replace(quiet, name="run", observers=(found,), ports=f"{ports[0]}-{ports[-1]}"),
    ).fit()
    assert found.driver == before
    for rank in range(2):
        sockets = found.by_process.pop(int((ranks / str(rank)).read_text()), [])
        assert Counter(sockets) == Counter(listed_in_docs(backend, rank))
    assert found.by_process == {}, "a process that is no rank listens"
