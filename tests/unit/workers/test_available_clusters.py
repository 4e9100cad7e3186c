"""What is found out about a job before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from polytrain.backends.reference import Reference
from polytrain.config.run_spec import RunSpec
from polytrain.policy.scaling import AvailableClusters
from polytrain.workers.available_clusters import available_clusters


def clusters(**arguments: Any) -> AvailableClusters:
    return available_clusters(RunSpec(backend=Reference(), **arguments))


def plain(config: dict[str, int]) -> int:
    array = config["array"]
    return array + 1


def imports_it() -> None:
    import ray

    ray.init()


def imports_a_part() -> None:
    from ray.util import ActorPool

    ActorPool([])


def uses_a_global() -> None:
    ray.get(None)  # type: ignore[name-defined]  # noqa: F821  # as in a script that has imported it


def within() -> Callable[[], None]:
    def inner() -> None:
        import ray

        ray.init()

    return inner


class Called:
    """Has no code of its own that could be looked at."""

    def __call__(self) -> None:
        """Train."""


@pytest.mark.parametrize(
    ("function", "uses"),
    [
        (plain, False),
        (imports_it, True),
        (imports_a_part, True),
        (uses_a_global, True),
        (within, True),
        (Called(), False),
        (None, False),
    ],
)
def test_a_function_that_names_ray_uses_it(function: object, uses: bool) -> None:
    assert clusters(train_loop_per_worker=function).function_uses_ray is uses


def test_data_sets_of_ray_are_known_by_their_module() -> None:
    theirs = type("Dataset", (), {"__module__": "ray.data.dataset"})()
    data = {"train": theirs, "valid": {"x": [1, 2]}}
    assert clusters(datasets=data).ray_datasets == ("train",)


def test_a_ray_that_another_thread_imports_now_is_not_initialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert not clusters(train_loop_per_worker=plain).ray_is_initialized
