"""What a training function is called with, and functions that expect something else."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polytrain import InvalidJobError, RunConfig, ScalingConfig, Trainer
from polytrain.backends.reference import Reference
from polytrain.config.loop_config import call_problems, config_problems, recorded


@dataclass(frozen=True, slots=True)
class Optimizer:
    lr: float = 0.1
    api_key: str = "sk-12345"


@dataclass
class Config:
    epochs: int = 2
    optimizer: Optimizer = field(default_factory=Optimizer)


class Pair(NamedTuple):
    lr: float
    epochs: int


class Ordinary:
    lr = 0.1

    def __init__(self) -> None:
        self.epochs = 2
        self._cache = {1: 2}

    def schedule(self) -> None: ...


class AttributeDict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"lr": 0.1}, {"lr": 0.1}),
        (Config(), {"epochs": 2, "optimizer": {"lr": 0.1, "api_key": "sk-12345"}}),
        ({"optimizers": [Optimizer()]}, {"optimizers": [{"lr": 0.1, "api_key": "sk-12345"}]}),
        (argparse.Namespace(lr=0.1), {"lr": 0.1}),
        (types.SimpleNamespace(lr=0.1), {"lr": 0.1}),
        (Pair(0.1, 2), {"lr": 0.1, "epochs": 2}),
        (Ordinary(), {"lr": 0.1, "epochs": 2}),
        (AttributeDict(lr=0.1), {"lr": 0.1}),
    ],
)
def test_a_config_is_recorded_by_its_values(config: Any, values: Any) -> None:
    assert list(config_problems(config)) == []
    assert recorded(config) == values


def test_a_model_of_pydantic_is_a_config() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", lr=(float, 0.1))
    config = pydantic.create_model("Settings", epochs=(int, 2), inner=(inner, inner()))()
    assert list(config_problems(config)) == []
    assert recorded(config) == {"epochs": 2, "inner": {"lr": 0.1}}


def test_a_model_of_attrs_is_a_config() -> None:
    attrs = pytest.importorskip("attrs")
    config = attrs.make_class("Settings", {"lr": attrs.field(default=0.1)}, slots=True)()
    assert list(config_problems(config)) == []
    assert recorded(config) == {"lr": 0.1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (0.1, "it is a float. Pass a dict, or an object with fields such as a dataclass"),
        ("config.yaml", "it is a str. Pass a dict, or an object with fields such as a dataclass"),
        ([1], "it is a list. Pass a dict, or an object with fields such as a dataclass"),
        (Config, "it is the class Config. Pass a dict, or an object with fields such as a"),
        (print, "it is a builtin_function_or_method. Pass a dict"),
    ],
)
def test_what_has_no_fields_is_no_config(config: Any, message: str) -> None:
    [problem] = config_problems(config)
    assert str(problem).startswith(f"train_loop_config: {message}")


def test_a_config_that_contains_itself_is_refused() -> None:
    config: dict[str, Any] = {"lr": 0.1}
    config["all"] = config
    [problem] = config_problems(config)
    assert "contains itself" in problem.what


def test_a_class_is_named_with_the_call_that_makes_its_object() -> None:
    [problem] = config_problems(Config)
    assert problem.remedy.endswith(": Config()")


def two(lr: float, epochs: int) -> None: ...
def two_defaults(lr: float = 0, epochs: int = 1) -> None: ...
def one_value(lr: float = 0.1) -> None: ...
def required_value(lr: float) -> None: ...
def flag(config: Any, verbose: bool = False) -> None: ...
def by_keyword(*, lr: float) -> None: ...
def every_keyword(**values: Any) -> None: ...
def nothing() -> None: ...
def optional(config: Any = None) -> None: ...
def empty(config: Any = {}) -> None: ...  # noqa: B006  # it is written so
def any_name(hyperparameters: Any) -> None: ...
def any_number(*args: Any) -> None: ...


VALUES = {"lr": 0.1, "epochs": 2}


@pytest.mark.parametrize(
    ("function", "config"),
    [
        (any_name, VALUES),
        (optional, VALUES),
        (empty, VALUES),
        (any_number, VALUES),
        (flag, VALUES),
        (partial(two, epochs=2), {"seed": 1}),
        (partial(flag, verbose=True), VALUES),
        # Scripts for Ray Train pass an object beside numbers in such a dict.
        (any_name, {"hyperparameters": Optimizer()}),
        (lambda config: two(**config), VALUES),
        (any_name, Config()),
        (nothing, None),
        (two_defaults, None),
    ],
)
def test_a_function_takes_the_config_as_one_argument(
    function: Callable[..., Any], config: Any
) -> None:
    assert list(call_problems(function, config)) == []


@pytest.mark.parametrize(
    ("function", "config", "message"),
    [
        (two, VALUES, "two(lr, epochs) is called with one argument"),
        (two_defaults, VALUES, "the whole train_loop_config, which would be its 'lr'. Write def"),
        (one_value, VALUES, "which would be its 'lr'"),
        (one_value, {"seed": 1}, "which would be its 'lr'"),
        (one_value, Config(), "one_value(**vars(config))"),
        (required_value, VALUES, "which would be its 'lr'"),
        (flag, {"verbose": True}, "and would get nothing as 'verbose'"),
        (by_keyword, VALUES, "pass lambda config: by_keyword(**config)"),
        (every_keyword, VALUES, "pass lambda config: every_keyword(**config)"),
        (nothing, VALUES, "takes no argument, and gets train_loop_config. Let it take one, def"),
        (two, None, "needs more than one argument, and gets at most train_loop_config. Take them"),
    ],
)
def test_a_function_that_expects_the_values_one_by_one_is_refused(
    function: Callable[..., Any], config: Any, message: str
) -> None:
    [problem] = call_problems(function, config)
    assert message in str(problem)


SEEN: list[Any] = []


def test_an_object_reaches_the_function_and_its_values_the_journal(tmp_path: Path) -> None:
    def train(config: Config) -> None:
        SEEN.append(config)
        config.epochs = 0

    def trainer(config: Config) -> Trainer:
        return Trainer(
            Reference(),
            train,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=tmp_path, progress="none"),
        )

    given = Config()
    trainer(given).fit()
    assert [type(config) for config in SEEN] == [Config]
    assert given.epochs == 2
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert '"epochs": 2' in journal or '"epochs":2' in journal
    assert "sk-12345" not in journal
    assert '"optimizer.lr": 0.1' in journal or '"optimizer.lr":0.1' in journal
    # The same config again has the same result; another one is another run.
    trainer(Config()).fit()
    assert len(SEEN) == 1
    with pytest.raises(InvalidJobError, match=r"train_loop_config: .*'epochs': 3"):
        trainer(Config(epochs=3)).fit()
