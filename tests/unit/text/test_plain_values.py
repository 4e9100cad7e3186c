"""NumPy's numbers are numbers, wherever a user passes one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polytrain import FailureConfig, ScalingConfig, make_trainer
from polytrain.text.described import is_whole, plain

DATA = {"x": [1.0, 2.0], "label": [1.0, 2.0]}


def test_scalars_of_numpy_become_pythons() -> None:
    params = {"depth": np.int64(3), "rate": np.float32(0.5), "at": [np.uint8(1), 2], "on": np.True_}
    assert repr(plain(params)) == "{'depth': 3, 'rate': 0.5, 'at': [1, 2], 'on': True}"
    assert repr(plain((np.int64(1), np.str_("a")))) == "(1, 'a')"


@pytest.mark.parametrize("value", [{"a": [1, 2]}, [None], (1.5,), np.arange(3), "a", DATA])
def test_what_is_plain_is_the_same_object(value: Any) -> None:
    assert plain(value) is value


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_a_whole_number(value: Any) -> None:
    assert is_whole(value)


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float64(3), "3", None])
def test_no_whole_number(value: Any) -> None:
    assert not is_whole(value)


def test_a_run_takes_them_as_options_and_in_its_configuration() -> None:
    workers = ScalingConfig(
        num_workers=np.int64(0), resources_per_worker={"CPU": np.float32(1), "GPU": np.int64(0)}
    )
    rate: Any = np.float32(0.25)
    of_numpy, of_python = (
        make_trainer(
            "reference",
            label="label",
            rounds=rounds,
            learning_rate=rate,
            datasets={"train": DATA},
            scaling_config=workers,
        ).fit()
        for rounds in (np.int64(2), 2)
    )
    assert of_numpy.metrics == of_python.metrics


def test_an_option_that_is_unknown_is_reported_alone(problems: Any) -> None:
    problems(rouns=1, learning_rate=np.float32(0.5)).only("rouns")


def test_seconds_and_counts() -> None:
    failure = FailureConfig(max_failures=np.int64(2), hang_timeout_s=np.float32(5))
    assert (failure.max_failures, failure.hang_timeout_s) == (2, 5.0)
    assert type(failure.max_failures) is int
