"""What the journal keeps of a run's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from polytrain import FailureConfig, RunConfig, ScalingConfig, ValidationConfig
from polytrain.backends.reference import Reference
from polytrain.record.configuration import (
    Configuration,
    chosen,
    configuration_in,
    hyperparameters_of,
    options_of,
)
from polytrain.trackers import MLflow

SECRET = "correct horse"


class Watcher:
    def __call__(self) -> None: ...


def is_good_enough(report: Any) -> bool:
    return False


def paths(path: str, config: Any) -> list[str]:
    return [
        name
        for each in fields(config)
        for name in (
            paths(f"{path}.{each.name}", getattr(config, each.name))
            if is_dataclass(getattr(config, each.name))
            else [f"{path}.{each.name}"]
        )
    ]


def test_every_option_is_kept_but_where_the_run_is() -> None:
    every = [*paths("scaling_config", ScalingConfig()), *paths("run_config", RunConfig())]
    kept = options_of(ScalingConfig(), RunConfig())
    place = {"run_config.name", "run_config.storage_path", "run_config.storage_filesystem"}
    assert list(kept) == [name for name in every if name not in place]
    assert "run_config.failure_config.max_failures" in kept


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (RunConfig(failure_config=FailureConfig(max_failures=3)), "failure_config.max_failures", 3),
        (RunConfig(observers=(Watcher(), Watcher())), "observers", ["Watcher", "Watcher"]),
        (RunConfig(observers=[MLflow(f"postgresql://me:{SECRET}@db")]), "observers", ["MLflow"]),
        (RunConfig(stop=is_good_enough), "stop", "is_good_enough"),
        (RunConfig(stop={"loss": "<= 0.1"}), "stop", {"loss": "<= 0.1"}),
        (RunConfig(track=("csv", "mlflow")), "track", ["csv", "mlflow"]),
        (
            RunConfig(worker_runtime_env={"env_vars": {"KEY": SECRET}, "pip": [SECRET]}),
            "worker_runtime_env",
            {"env_vars": {"KEY": "…"}, "pip": "…"},
        ),
    ],
)
def test_an_option_that_is_not_the_default(config: RunConfig, name: str, value: Any) -> None:
    kept = options_of(ScalingConfig(), config)
    assert chosen(kept) == {f"run_config.{name}": value}
    assert SECRET not in json.dumps(kept)


def test_the_validation_is_kept() -> None:
    config = ValidationConfig(fn=is_good_enough, ray_remote_kwargs={"runtime_env": {"a": SECRET}})
    assert chosen(options_of(ScalingConfig(), RunConfig(), config)) == {
        "validation_config.fn": "is_good_enough",
        "validation_config.ray_remote_kwargs": {"runtime_env": {"a": "…"}},
    }


@dataclass(frozen=True, kw_only=True)
class Boosted(Reference):
    params: Any = None


def test_the_users_hyperparameters_come_first() -> None:
    config = {
        "lr": 0.1,
        "optimizer": {"name": "adam", "betas": (0.9, 0.99), "schedule": is_good_enough},
        "layers": [{"units": 8}, {"units": 4}],
        "nothing": None,
        "empty": {},
    }
    found = hyperparameters_of(config, Boosted(rounds=3, params={"eta": 0.3}))
    assert list(found.items()) == [
        ("lr", 0.1),
        ("optimizer.name", "adam"),
        ("optimizer.betas", [0.9, 0.99]),
        ("optimizer.schedule", "is_good_enough"),
        ("layers.0.units", 8),
        ("layers.1.units", 4),
        ("nothing", None),
        ("empty", {}),
        ("rounds", 3),
        ("params.eta", 0.3),
    ]


def test_an_option_with_a_name_of_the_users_is_that_of_the_backend() -> None:
    found = hyperparameters_of({"rounds": 100}, Boosted(rounds=3))
    assert found == {"rounds": 100, "reference.rounds": 3}


def test_a_hyperparameter_is_no_secret() -> None:
    config = {
        "hf_token": SECRET,
        "nested": {"api_key": SECRET, "user": {"password": Path(SECRET)}},
        "args": ["--api-key", SECRET, f"db_password={SECRET}"],
        "database": f"postgresql://me:{SECRET}@db/x".replace(" ", "-"),
        "auth": {"credentials": {"a": SECRET}},
        "num_tokens": 3,
        "pad_token": "<pad>",
    }
    found = hyperparameters_of(config, Boosted())
    assert SECRET not in json.dumps(found)
    assert SECRET.replace(" ", "-") not in json.dumps(found)
    assert found["hf_token"] == found["nested.user.password"] == "…"
    assert (found["num_tokens"], found["pad_token"]) == (3, "<pad>")


def test_what_a_later_version_adds_is_ignored() -> None:
    written = {"versions": {"torch": "2.9"}, "of a later version": 1}
    assert configuration_in(written) == Configuration(versions={"torch": "2.9"})
