"""Where the runs of these tests have their workers: in this process, unless a test is about Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.own_ray import own_ray

from polytrain import RunConfig


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    """A Ray with 4 CPUs, for the module's tests from here on."""
    with own_ray(num_cpus=4):
        yield


@pytest.fixture(scope="module", autouse=True)
def ray_of_module(request: pytest.FixtureRequest) -> None:
    """Have Ray for a module that is marked: before its own fixtures."""
    if request.node.get_closest_marker("on_ray"):
        request.getfixturevalue("running_ray")


@pytest.fixture(autouse=True)
def ray_of_test(request: pytest.FixtureRequest) -> None:
    """Have Ray for a test that is marked. Those of its module that aren't have come before."""
    if request.node.get_closest_marker("on_ray"):
        request.getfixturevalue("running_ray")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory for a module's examples.

    Zygotes import anew where the environment differs. Ray's processes must find the token that
    this process has read once.
    """
    directory = tmp_path_factory.mktemp("home")
    tokens = Path.home() / ".ray"
    tokens.mkdir(exist_ok=True)
    (directory / ".ray").symlink_to(tokens)
    return directory


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples write where a user would have them write."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)


@pytest.fixture
def quiet(tmp_path: Path) -> RunConfig:
    """A run in a directory of the test's own, without a line of progress."""
    return RunConfig(storage_path=tmp_path, progress=False)
