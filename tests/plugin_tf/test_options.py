"""TensorFlow's driver half: its one option, and what its workers need."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from polytrain import InvalidJobError, make_trainer
from polytrain_plugins import Device, Job
from polytrain_tf import TensorFlow

JOB = Job(num_workers=2, use_gpu=False, cpus_per_worker=1, has_training_function=True, datasets={})


@pytest.mark.parametrize("timeout", [0, -1.5])
def test_a_timeout_is_a_time(timeout: float) -> None:
    [problem] = TensorFlow(timeout_s=timeout).problems(JOB)
    assert problem.field == "timeout_s"
    assert str(timeout) in problem.what


def test_usual_options_have_no_problem() -> None:
    assert list(TensorFlow().problems(JOB)) == []
    assert list(TensorFlow(timeout_s=0.5).problems(replace(JOB, use_gpu=True))) == []
    assert Device.GPU in TensorFlow.capabilities.devices


def test_it_takes_a_training_function_and_nothing_else() -> None:
    with pytest.raises(InvalidJobError, match="make_trainer\\('tensorflow', train_func\\)"):
        make_trainer("tensorflow")


@pytest.mark.parametrize("options", [{"params": {}}, {"label": "y"}])
def test_options_of_other_backends_are_unknown(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError, match="tensorflow backend has no such option"):
        make_trainer("tensorflow", lambda: None, **options)


def test_trainers_find_the_framework_imported() -> None:
    assert {"tensorflow", "keras"} <= set(TensorFlow().demand(JOB).preload)


def test_it_travels() -> None:
    assert pickle.loads(pickle.dumps(TensorFlow(timeout_s=5))) == TensorFlow(timeout_s=5)
