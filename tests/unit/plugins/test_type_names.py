"""Messages name the type of a value as one says it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain import RunConfig, ScalingConfig
from polytrain.api.config_checks import config_problems
from polytrain_plugins.type_names import a_type, with_article

SOURCES = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "an int"),
        ("x", "a str"),
        (None, "None"),
        ({}, "a dict"),
        (np.zeros(1), "an ndarray"),
        (np.uint8(1), "a uint8"),
        (OSError(), "an OSError"),
        (RunConfig(), "a RunConfig"),
        (RunConfig, "the class RunConfig"),
    ],
)
def test_a_value_is_named_with_its_article(value: Any, said: str) -> None:
    assert a_type(value) == said


@pytest.mark.parametrize(
    "said",
    ["an XGBClassifier", "an LGBMRegressor", "a Namespace", "a UserCallback", "an Iterable"],
)
def test_an_article_is_the_one_that_is_spoken(said: str) -> None:
    assert with_article(said.split()[1]) == said


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (4, "run_config: it is an int. Pass a RunConfig"),
        (RunConfig, "run_config: it is the class RunConfig. Pass RunConfig(…)"),
        ({"name": "a", "x": 1}, "run_config: it is a dict. Pass a RunConfig: RunConfig(name=…)"),
    ],
)
def test_a_wrong_configuration_is_named_with_the_right_call(run: Any, message: str) -> None:
    assert [str(problem) for problem in config_problems(ScalingConfig(), run)] == [message]


def test_no_message_has_an_article_of_its_own_before_a_type() -> None:
    wrong = re.compile(r"\b[Aa] \{type\(")
    sources = (path for root in ("core", "plugins") for path in (SOURCES / root).rglob("*.py"))
    plugins = (path for root in SOURCES.glob("plugin_*/src") for path in root.rglob("*.py"))
    found = [path.name for path in (*sources, *plugins) if wrong.search(path.read_text())]
    assert found == []
