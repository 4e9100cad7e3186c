"""What a field of a configuration takes is stated at the field, and nothing else passes."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from polytrain.config.configs import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from polytrain.config.constraints import field_problems

CONFIGS = (ScalingConfig(), RunConfig(), FailureConfig(), CheckpointConfig(), DataConfig())

WRONG: dict[str, list[Any]] = {
    "Seconds": [-1, True, "10", math.nan, math.inf, 1e12, [1]],
    "Whole": [-(2**70), 1.5, True, "3", math.inf],
    "bool": [2, -1, 1.0, "no", "yes"],
    "choice": ["nonsense", 1, b"PACK"],
}


def kind_of(hint: Any) -> str | None:
    """Which of the wrong values above a field mustn't take; None if it isn't of these kinds."""
    if get_origin(hint) is Annotated:
        return type(get_args(hint)[1]).__name__
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
        assert repr(wrong) in problem.what
        assert problem.remedy.startswith("Give ")


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
