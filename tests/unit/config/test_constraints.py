"""What a field of a configuration takes is stated at the field, and nothing else passes."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from polytrain.config.configs import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from polytrain.config.constraints import field_problems
from polytrain_plugins.type_names import quoted

CONFIGS = (ScalingConfig(), RunConfig(), FailureConfig(), CheckpointConfig(), DataConfig())

WRONG: dict[str, list[Any]] = {
    "Seconds": [-1, True, "10", math.nan, math.inf, 1e12, 10**400, -(10**5000), [1]],
    "Whole": [-(2**70), 10**5000, 1.5, True, "3", math.inf],
    "bool": [2, -1, 1.0, "no", "yes"],
    "choice": ["nonsense", 1, b"PACK"],
}

OWN_RULES = ("Checked", "Entries", "Function")

BY_FIELD: dict[str, tuple[list[Any], str]] = {
    "CheckpointConfig.memory": ([0, 10**400, True, 1.5, "always"], 'Give 1 or more, "auto"'),
    "ScalingConfig.num_workers": ([-1, 10**400, 1.5, (2, 1), (1, 10**5000), [1, 2], "2"], "Give "),
    "ScalingConfig.resources_per_worker": (
        [
            5,
            {"CPU": -1},
            {"CPU": math.nan},
            {"CPU": math.inf},
            {"CPU": 1e-5},
            {"GPU": 1.5},
            {"NPU": 1.5},
            {"gpu": 1},
            {"a": 10**400},
            {"object_store_memory": 1e7},
        ],
        "",
    ),
    "ScalingConfig.label_selector": ([5, {"a": 1}, [{"": "b"}], ["a"]], ""),
    "RunConfig.name": (["", "..", "a/b", "a\nb", 5, "é" * 128], "Give a name"),
    "RunConfig.storage_path": (["", "a\0b", Path("a\0b"), "~nobody-of-this-name/runs", 5], ""),
    "RunConfig.ports": (
        [True, 2.5, (30000, 30100), "", "30000-", "30000:30100", 80, "1000-2000", "60000-70000"],
        "Give ",
    ),
    "RunConfig.network_interface": (
        [5, "", "eth1,ens5", "10.1.0.3", "10.1.0.3/16", "fd00::/8", "a name"],
        "Give the name",
    ),
    "FailureConfig.divergence": (
        [5, "", [], [5], {"loss": 1}, {"loss": 10**400}, {"loss": True}, int],
        "Give ",
    ),
    "FailureConfig.on_rollback": ([5, "lower"], "Pass a function"),
    "CheckpointConfig.checkpoint_score_attribute": (["", 5], "Give the name"),
    "DataConfig.columns": (["x", 5], ""),
    "DataConfig.transform": (["x", 5], "Pass a function"),
}
"""Fields with rules of their own: wrong values, and how the remedy begins."""


def test_an_array_is_taken_for_a_list() -> None:
    assert DataConfig(datasets_to_split=np.array(["a", "b"])).datasets_to_split == ["a", "b"]


def kind_of(hint: Any) -> str | None:
    """Which of the wrong values above a field mustn't take; None if it isn't of these kinds."""
    if get_origin(hint) is Annotated:
        kind = type(get_args(hint)[1]).__name__
        return None if kind in OWN_RULES else kind
    if hint is bool:
        return "bool"
    return "choice" if "Literal" in str(hint) else None


CASES = [
    pytest.param(config, field.name, kind, id=f"{type(config).__name__}.{field.name}")
    for config in CONFIGS
    for field in fields(config)
    if (kind := kind_of(get_type_hints(type(config), include_extras=True)[field.name]))
]


@pytest.mark.parametrize(("config", "name", "kind"), CASES)
def test_a_field_takes_its_own_values_alone(config: Any, name: str, kind: str) -> None:
    assert list(field_problems(config)) == []
    for wrong in WRONG[kind]:
        [problem] = field_problems(replace(config, **{name: wrong}))
        assert problem.field == f"{type(config).__name__}.{name}"
        assert quoted(wrong) in problem.what
        assert problem.remedy.startswith("Give ")


@pytest.mark.parametrize("field", BY_FIELD)
def test_a_field_with_rules_of_its_own_names_the_value(field: str) -> None:
    [config] = [config for config in CONFIGS if field.startswith(type(config).__name__)]
    values, remedy = BY_FIELD[field]
    for wrong in values:
        [problem] = field_problems(replace(config, **{field.partition(".")[2]: wrong}))
        assert problem.field == field
        assert problem.remedy.startswith(remedy)


def test_every_field_with_rules_of_its_own_is_tried() -> None:
    found = {
        f"{type(config).__name__}.{name}"
        for config in CONFIGS
        for name, hint in get_type_hints(type(config), include_extras=True).items()
        if get_origin(hint) is Annotated and type(get_args(hint)[1]).__name__ in OWN_RULES
    }
    assert found == set(BY_FIELD)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(storage_path=5), "RunConfig.storage_path: it is an int. Pass a path"),  # type: ignore[arg-type]  # wrong on purpose
        (RunConfig(failure_config=5), "RunConfig.failure_config: it is an int. Pass a Failure"),  # type: ignore[arg-type]  # wrong on purpose
        (ScalingConfig(accelerator_type=1), "accelerator_type: it is an int. Pass a str"),  # type: ignore[arg-type]  # wrong on purpose
        (DataConfig(group=1), "DataConfig.group: it is an int. Pass a str"),  # type: ignore[arg-type]  # wrong on purpose
        (
            RunConfig(failure_config=FailureConfig(max_failures=-2)),
            "FailureConfig.max_failures: -2 is not a number of failures",
        ),
    ],
)
def test_a_type_alone_states_what_a_field_takes(config: Any, message: str) -> None:
    [problem] = field_problems(config)
    assert message in str(problem)


def test_every_number_and_choice_states_what_it_takes() -> None:
    free = [
        f"{type(config).__name__}.{field.name}"
        for config in CONFIGS
        for field in fields(config)
        if get_type_hints(type(config), include_extras=True)[field.name] in (int, float)
    ]
    assert free == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FailureConfig(hang_timeout_s=0), "above 0, or None to turn hang detection off"),
        (FailureConfig(rendezvous_timeout_s=math.inf), "at least 0 and at most 1e+09"),
        (CheckpointConfig(num_to_keep=0), "Give 1 or more, or None to keep all"),
        (FailureConfig(hang_action="kil"), "'kill_if_idle' or 'kill' or 'warn'"),  # type: ignore[arg-type]  # wrong on purpose
        (RunConfig(if_finished="old"), "'return' or 'error' or 'new' or None"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_the_remedy_says_what_it_takes(config: Any, message: str) -> None:
    [problem] = field_problems(config)
    assert message in problem.remedy
