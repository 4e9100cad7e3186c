"""Where tasks run that an actor in a placement group starts, such as a trial of Ray Tune."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from polytrain.ray_api.state import with_placement
from polytrain.validation.ray_validator import RayValidator


def within(monkeypatch: pytest.MonkeyPatch, *bundles: dict[str, float]) -> None:
    group = SimpleNamespace(bundle_specs=list(bundles)) if bundles else None
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: group)


def test_an_actor_that_holds_all_of_its_group_starts_tasks_outside_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within(monkeypatch, {"CPU": 1})
    assert with_placement({"num_cpus": 2}) == {"num_cpus": 2, "scheduling_strategy": "DEFAULT"}


@pytest.mark.parametrize("bundles", [(), ({"CPU": 1}, {"CPU": 3})], ids=["no group", "spare"])
def test_ray_places_tasks_where_a_group_has_other_bundles(
    bundles: tuple[dict[str, float], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    within(monkeypatch, *bundles)
    assert with_placement({"num_cpus": 1}) == {"num_cpus": 1}


@pytest.mark.parametrize("option", ["placement_group", "scheduling_strategy"])
def test_what_the_user_chooses_stays(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, {"CPU": 1})
    options: dict[str, Any] = {option: "SPREAD" if option == "scheduling_strategy" else None}
    assert with_placement(options) == options
    RayValidator(b"", [], options)
