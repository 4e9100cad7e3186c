"""Tests that are long by nature: a fixed selection each time, everything with `--sweep`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import pytest

Case = TypeVar("Case")

_OPTION = "--sweep"


class Selected(Protocol):
    """Chooses a sweep's cases: all with `--sweep`, otherwise one in so many, always the same."""

    def __call__(self, cases: Iterable[Case], one_in: int) -> list[Case]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, action="store_true", help="run all cases of sweeps (make sweep)")


_runs_everything = False


def pytest_configure(config: pytest.Config) -> None:
    global _runs_everything
    _runs_everything = config.getoption(_OPTION)
    config.addinivalue_line(
        "markers",
        "sweep(one_in=1): part of `make sweep`, where it has all its cases. "
        "`make test` has one in so many, always the same.",
    )
    config.addinivalue_line("markers", "only_in_sweep: a case that `make test` leaves out.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(_OPTION):
        return
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen: Counter[str] = Counter()
    for item in items:
        is_left_out = item.get_closest_marker("only_in_sweep") is not None
        if sweep := item.get_closest_marker("sweep"):
            function = item.nodeid.partition("[")[0]
            is_left_out |= seen[function] % sweep.kwargs.get("one_in", 1) > 0
            seen[function] += 1
        (left_out if is_left_out else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def only_in_sweep(*values: Any, id: str | None = None) -> Any:
    """A parameter set that `make test` leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.only_in_sweep)


def examples(everything: int, *, in_test: int) -> int:
    """How many examples a property is tried with: fewer in `make test`."""
    return everything if _runs_everything else in_test


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> Selected:
    everything = request.config.getoption(_OPTION)

    def choose(cases: Iterable[Case], one_in: int) -> list[Case]:
        return list(cases) if everything else list(cases)[::one_in]

    return choose
