"""Every way in which a `ValidationConfig` can be wrong is named before any worker starts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import polytrain
from polytrain import (
    InvalidJobError,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
    make_trainer,
)
from polytrain.api.validation_checks import inline_problems, validation_problems
from polytrain.backends.reference import Reference
from polytrain.config.configs import RunConfig
from polytrain.config.run_spec import RunSpec
from polytrain.config.validation_config import task_of, validation_of_report
from polytrain.policy.scaling import AvailableClusters, choose_cluster, local_problems


def validate(checkpoint: Any, a: int = 1) -> Mapping[str, Any]:
    return {"val": a}


def takes_nothing() -> Mapping[str, Any]:
    return {}


def takes_more(checkpoint: Any, threshold: float) -> Mapping[str, Any]:
    return {}


async def is_async(checkpoint: Any) -> Mapping[str, Any]:
    return {}


def yields(checkpoint: Any) -> Any:
    yield {}


def holding_a_lock(lock: Any = threading.Lock()) -> Any:  # noqa: B008  # one that can't be pickled
    def function(checkpoint: Any) -> Any:
        return {"locked": lock.locked()}

    return function


def train() -> None:
    """Do nothing."""


def spec(validation: Any, function: Any = None) -> RunSpec:
    return RunSpec(
        backend=Reference(), train_loop_per_worker=function, validation_config=validation
    )


def task(**fields: Any) -> ValidationTaskConfig:
    return ValidationTaskConfig(**fields)


WRONG = {
    "no config": (validate, "validation_config: it is a function. Pass a ValidationConfig"),
    "not callable": (ValidationConfig(fn=3), "ValidationConfig.fn: 3 is not callable"),
    "no argument": (
        ValidationConfig(fn=takes_nothing),
        r"ValidationConfig.fn: takes_nothing\(\).* is called with \(checkpoint\)",
    ),
    "an unknown argument": (
        ValidationConfig(fn=validate, task_config=task(fn_kwargs={"b": 1})),
        r"ValidationConfig.fn: .* \(checkpoint, b=…\): got an unexpected keyword argument 'b'",
    ),
    "async": (ValidationConfig(fn=is_async), "calling is_async makes a coroutine"),
    "generator": (ValidationConfig(fn=yields), "calling yields makes a generator"),
    "not picklable": (
        ValidationConfig(fn=holding_a_lock()),
        "ValidationConfig.fn: it can't be sent.*`lock` is a lock",
    ),
    "another task": (
        ValidationConfig(fn=validate, task_config={"timeout_s": 1}),
        "ValidationConfig.task_config: it is a dict. Pass a ValidationTaskConfig",
    ),
    "arguments that aren't a dict": (
        ValidationConfig(fn=validate, task_config=task(fn_kwargs=[1])),
        "ValidationConfig.task_config.fn_kwargs: it is a list",
    ),
    "arguments that JSON can't hold": (
        ValidationConfig(fn=validate, task_config=task(fn_kwargs={"a": {1, 2}})),
        "ValidationConfig.task_config.fn_kwargs: 'a': {1, 2} can't be written down in JSON",
    ),
    "no time": (
        ValidationConfig(fn=validate, task_config=task(timeout_s=0)),
        "ValidationConfig.task_config.timeout_s: 0 is too short",
    ),
    "a time that is none": (
        ValidationConfig(fn=validate, task_config=task(timeout_s="1 h")),
        "ValidationConfig.task_config.timeout_s: '1 h' is not a number of seconds",
    ),
    "another action": (
        ValidationConfig(fn=validate, on_failure="ignore"),  # type: ignore[arg-type]  # the point
        "ValidationConfig.on_failure: 'ignore' is unknown. Give 'warn' or 'fail'",
    ),
    "options that aren't a dict": (
        ValidationConfig(fn=validate, ray_remote_kwargs="num_gpus=1"),
        "ValidationConfig.ray_remote_kwargs: it is a str",
    ),
    "an option that is no name": (
        ValidationConfig(fn=validate, ray_remote_kwargs={1: 2}),
        "ValidationConfig.ray_remote_kwargs: 1 is not the name of an option",
    ),
    "a number that isn't written": (
        ValidationConfig(fn=validate, task_config=ValidationTaskConfig(fn_kwargs={"a": 10**5000})),
        "'a': a whole number of more than 80 digits can't be written down",
    ),
    "num_returns": (
        ValidationConfig(fn=validate, ray_remote_kwargs={"num_returns": 2}),
        "ValidationConfig.ray_remote_kwargs: .*num_returns",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    config, what = WRONG[case]
    with pytest.raises(InvalidJobError, match=what):
        make_trainer(
            "reference",
            takes_nothing,
            scaling_config=ScalingConfig(num_workers=0),
            validation_config=config,  # type: ignore[arg-type]  # some are no config
        )


def test_a_report_may_give_what_is_missing_and_only_a_function_reports() -> None:
    config = ValidationConfig(fn=takes_more)
    assert not list(validation_problems(spec(config, train)))
    [problem] = validation_problems(spec(config))
    assert "missing a required argument: 'threshold'" in problem.what


def test_it_is_named_together_with_all_else() -> None:
    with pytest.raises(InvalidJobError) as raised:
        make_trainer(
            "reference",
            takes_nothing,
            run_config=RunConfig(name="a/b"),
            validation_config=ValidationConfig(fn=takes_nothing, on_failure="no"),  # type: ignore[arg-type]  # the point
        )
    assert {"RunConfig.name", "ValidationConfig.fn", "ValidationConfig.on_failure"} <= {
        problem.field for problem in raised.value.problems
    }


@pytest.mark.parametrize(
    ("cls", "name"),
    [(ValidationConfig, "function"), (ValidationTaskConfig, "timeout")],
)
def test_a_misspelt_field_is_named(cls: Any, name: str) -> None:
    with pytest.raises(InvalidJobError, match=f"{cls.__name__}.{name}: there is no such field"):
        cls(**{name: 1})


def test_they_are_made_as_in_ray_train() -> None:
    made = ValidationConfig(validate, ValidationTaskConfig({"a": 2}, 60), {"num_cpus": 2})  # type: ignore[misc]  # without names, as in Ray Train
    assert made.task_config == ValidationTaskConfig(fn_kwargs={"a": 2}, timeout_s=60)
    assert made.ray_remote_kwargs == {"num_cpus": 2}
    bare = ValidationConfig(fn=validate, task_config=None, ray_remote_kwargs=None)  # type: ignore[arg-type]  # None stands for the default
    assert bare == ValidationConfig(fn=validate)
    assert not list(validation_problems(spec(bare, train)))
    assert ValidationTaskConfig(fn_kwargs=None).fn_kwargs == {}  # type: ignore[arg-type]  # the same


def test_options_that_only_ray_has_need_ray() -> None:
    gpus = ValidationConfig(fn=validate, ray_remote_kwargs={"num_gpus": 1, "num_cpus": 2})
    around = AvailableClusters(
        machine={"CPU": 4.0},
        ray_is_initialized=False,
        ray_address=None,
        ray_datasets=(),
        function_uses_ray=False,
        validation_options=("num_gpus",),
        has_gpu_device=False,
    )
    choice = choose_cluster(ScalingConfig(), around)
    assert (choice.is_local, choice.reason) == (
        False,
        "validations request num_gpus, which only Ray assigns",
    )
    [problem] = local_problems(ScalingConfig(cluster="local"), around)
    assert problem.field == "ValidationConfig.ray_remote_kwargs"
    [inline] = inline_problems(gpus)
    assert "num_gpus: num_workers=0 doesn't use Ray" in inline.what
    assert not list(inline_problems(ValidationConfig(fn=validate)))


class ObjectRef:
    """Stands for `ray.ObjectRef`, which only a process of its cluster can read."""


@pytest.mark.parametrize("scaling", [{"num_workers": 0}, {"cluster": "local"}])
def test_data_in_the_memory_of_ray_needs_ray(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(ObjectRef=ObjectRef, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    blocks = [ObjectRef()]

    def validate_on_blocks(checkpoint: Any) -> Any:
        return {"rows": len(blocks)}

    with pytest.raises(InvalidJobError, match=r"ValidationConfig\.fn: it names data in Ray's"):
        make_trainer(
            "reference",
            takes_nothing,
            scaling_config=ScalingConfig(**scaling),
            validation_config=ValidationConfig(fn=validate_on_blocks),
        )


def test_worker_processes_are_not_connected_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(ObjectRef=ObjectRef))
    blocks = [ObjectRef()]

    def train_on_blocks() -> None:
        print(len(blocks))

    def trained(num_workers: int) -> None:
        scaling = ScalingConfig(num_workers=num_workers)
        make_trainer("reference", train_on_blocks, scaling_config=scaling)

    with pytest.raises(InvalidJobError, match=r"train_loop_per_worker: it names data .* datasets="):
        trained(1)
    trained(0)


def test_memory_of_one_process_is_not_reached_by_another() -> None:
    with pytest.raises(InvalidJobError, match=r"validation_config: .*'memory://runs/.*memory of"):
        make_trainer(
            "reference",
            takes_nothing,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(storage_path="memory://runs"),
            validation_config=ValidationConfig(fn=validate),
        )


# report(validation=…)


@pytest.mark.parametrize("nothing", [False, None])
def test_a_report_without_validation_needs_nothing(nothing: Any) -> None:
    assert validation_of_report(nothing, has_checkpoint=False, validates=False) is None


@pytest.mark.parametrize(
    ("validation", "has_checkpoint", "validates", "error", "what"),
    [
        (True, True, False, ValueError, "validation_config=ValidationConfig"),
        (True, False, True, ValueError, "without a checkpoint"),
        ("yes", True, True, TypeError, "not a str"),
        (1, True, True, TypeError, "not a int"),
        (task(timeout_s=-1), True, True, ValueError, "validation.timeout_s: -1 is too short"),
        (task(fn_kwargs={"a": object()}), True, True, ValueError, "can't be written down"),
    ],
)
def test_a_report_that_can_not_be_validated_is_named(
    validation: Any, has_checkpoint: bool, validates: bool, error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        validation_of_report(validation, has_checkpoint=has_checkpoint, validates=validates)


def test_what_a_report_says_is_added_to_the_default() -> None:
    default = ValidationTaskConfig(fn_kwargs={"a": 1, "b": 1}, timeout_s=60)
    config = ValidationConfig(fn=validate, task_config=default)
    plain = validation_of_report(True, has_checkpoint=True, validates=True)
    own = validation_of_report(
        ValidationTaskConfig(fn_kwargs={"b": 2}), has_checkpoint=True, validates=True
    )
    assert plain is not None
    assert own is not None
    assert task_of(config, plain) == default
    assert task_of(config, own) == ValidationTaskConfig(fn_kwargs={"a": 1, "b": 2})


def test_the_classes_are_public() -> None:
    assert polytrain.ValidationFn.__name__ == "ValidationFn"
