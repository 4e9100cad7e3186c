"""Where the processes of a run on one machine listen: only a framework's own sockets show it."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.listeners import is_loopback, listeners

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain.testing.contract import kit_table
from polytrain_plugins import RunInfo, hookimpl

OPEN = {"reference": 0, "torch": 0, "xgboost": 1, "lightgbm": 0, "tensorflow": 1}
"""Backend → sockets of each rank that the framework binds to all interfaces, whatever it is told:
docs/security.md names them."""


class Lists:
    """Lists where the driver and its descendants listen while they train."""

    def __init__(self, listed: Path) -> None:
        self.driver: list[str] = []
        self.workers: list[list[str]] = []
        """Of each process that listens anywhere."""

        self._listed = listed

    @hookimpl
    def polytrain_reported(self, run: RunInfo) -> None:
        self.driver = listeners()
        children = psutil.Process().children(recursive=True)
        self.workers = [found for each in children if (found := listeners(each.pid))]
        self._listed.touch()


def trains_until_listed(config: dict[str, Any]) -> None:
    polytrain.report({"step": 1})
    while not config["listed"].exists():
        time.sleep(0.01)


def test_what_is_listed_is_where_this_process_listens() -> None:
    before = listeners()
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("", 0)):
        assert sorted(listeners()) == sorted([*before, "127.0.0.1", "0.0.0.0"])
    assert listeners() == before


@pytest.mark.parametrize("backend", OPEN)
def test_on_one_machine_workers_listen_at_the_loopback_address(
    backend: str, tmp_path: Path, quiet: RunConfig
) -> None:
    before, listed = listeners(), tmp_path / "listed"
    found = Lists(listed)
    make_trainer(
        backend,
        trains_until_listed,
        train_loop_config={"listed": listed},
        datasets={"train": kit_table()},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=replace(quiet, name="run", observers=(found,)),
    ).fit()
    assert found.driver == before
    assert found.workers, "rank 0 of every backend serves something"
    for of_one in found.workers:
        elsewhere = [each for each in of_one if not is_loopback(each)]
        assert len(elsewhere) <= OPEN[backend], found.workers
