"""Which Ray a run joins: nobody waits for a cluster that has died."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from polytrain import InvalidJobError
from polytrain.workers.ray.connection import address_to_join


@pytest.fixture
def alive() -> Iterator[str]:
    """The address of somebody who answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead() -> Iterator[str]:
    """An address at which nobody listens, nor can."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{silent.getsockname()[1]}"


def recorded(directory: Path, address: str) -> dict[str, str]:
    """The environment of a machine on which Ray has written this address down."""
    (directory / "ray").mkdir()
    (directory / "ray" / "ray_current_cluster").write_text(address)
    return {"RAY_TMPDIR": str(directory), "TMPDIR": "/nowhere"}


def test_without_any_cluster_ray_starts_one(tmp_path: Path) -> None:
    assert address_to_join({"TMPDIR": str(tmp_path)}) is None


def test_a_cluster_that_answers_is_joined(tmp_path: Path, alive: str) -> None:
    environment = recorded(tmp_path, alive)
    assert address_to_join(environment) is None
    assert address_to_join({**environment, "RAY_ADDRESS": alive}) is None
    assert address_to_join({**environment, "RAY_ADDRESS": "auto"}) is None


def test_a_cluster_that_has_died_is_reported_of_and_not_waited_for(
    tmp_path: Path, dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert address_to_join(recorded(tmp_path, dead)) == "local"
    [messages] = [record.getMessage() for record in caplog.records]
    assert dead in messages
    assert "doesn't answer" in messages
    assert "ray stop" in messages


@pytest.mark.parametrize("how", ["address", "auto"])
def test_a_cluster_that_was_asked_for_and_has_died_is_an_error(
    tmp_path: Path, dead: str, how: str
) -> None:
    asked = dead if how == "address" else "auto"
    with pytest.raises(InvalidJobError, match=f"{dead} doesn't answer") as caught:
        address_to_join({**recorded(tmp_path, dead), "RAY_ADDRESS": asked})
    [problem] = caught.value.problems
    assert problem.field == "RAY_ADDRESS"
    assert "unset" in problem.remedy


@pytest.mark.parametrize("asked", ["local", "ray://127.0.0.1:1", "not an address"])
def test_what_is_no_address_of_a_cluster_is_rays_to_judge(tmp_path: Path, asked: str) -> None:
    assert address_to_join({"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": asked}) is None
