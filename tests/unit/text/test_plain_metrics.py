"""What may be reported as a metric, and what becomes of it on the way."""

from __future__ import annotations

import datetime
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import polytrain
from polytrain.errors import NotInWorkerError
from polytrain.record.entries import MetricsReported
from polytrain.record.lines import DraftReports
from polytrain.text.metrics import plain_metrics, single_values
from polytrain.workers.processes.channel import FrameBuffer, pack


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, True),
        ("adam", "adam"),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array(3.0), 3.0),
        (np.array([[4]]), 4),
        ((1, np.int8(2)), [1, 2]),
        ({"auc": np.float32(0.5), 3: [np.int16(1)]}, {"auc": 0.5, "3": [1]}),
    ],
    ids=repr,
)
def test_numbers_of_any_library_become_pythons_own(value: Any, plain: Any) -> None:
    [(name, reported)] = plain_metrics({"metric": value}).items()
    assert (name, reported) == ("metric", plain)
    assert type(reported) is type(plain)


class OneNumber:
    """A tensor of a framework, as far as metrics care."""

    def item(self) -> float:
        return 0.125


def test_tensors_of_one_element_are_numbers() -> None:
    assert plain_metrics({"loss": OneNumber()}) == {"loss": 0.125}


@pytest.mark.parametrize(
    "refused",
    [np.arange(3), np.zeros(0), {1, 2}, object(), b"bytes", Fraction(1, 2)],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_by_its_name_and_type(refused: Any) -> None:
    with pytest.raises(TypeError, match=f"'loss' is of the type {type(refused).__name__}"):
        plain_metrics({"loss": refused})


@pytest.mark.parametrize("refused", [2**63, -(2**63) - 1, np.uint64(2**64 - 1), 10**30], ids=repr)
def test_a_number_of_more_than_64_bits_is_reported_as_such(refused: Any) -> None:
    found = rf"'tokens' is {int(refused)}, a whole number of more than 64 bits.*float or a string"
    with pytest.raises(TypeError, match=found):
        plain_metrics({"tokens": refused})


def test_what_is_refused_deep_inside_is_named_with_its_path() -> None:
    with pytest.raises(TypeError, match="'valid/by class/a' is of the type set"):
        plain_metrics({"valid": {"by class": {"a": {1}}}})


@pytest.mark.parametrize("metrics", [0.5, [1], None, {1}])
def test_metrics_are_a_dict(metrics: Any) -> None:
    with pytest.raises(TypeError, match=f"not (a )?{type(metrics).__name__.removesuffix('Type')}"):
        plain_metrics(metrics)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"a/b": 1, "a": {"b": 2}}, "a/b"),
        ({"a": {"b/c": 1, "b": {"c": 2}}}, "a/b/c"),
        ({1: 0.5, "1": 0.25}, "1"),
        ({"by class": {1: 0.5, "1": 0.25}}, "by class/1"),
    ],
)
def test_two_metrics_of_one_name_are_refused(metrics: dict[Any, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"Two metrics are named '{name}'"):
        plain_metrics(metrics)


@given(metrics=st.dictionaries(st.text(), plain_values, max_size=3))
def test_plain_values_stay_as_they_are(metrics: dict[str, Any]) -> None:
    names = [name for name, _ in single_values(metrics)]
    assume(len(names) == len(set(names)))
    assert plain_metrics(metrics) == metrics


@pytest.mark.parametrize(
    "odd",
    [
        np.datetime64("2024-01-01"),
        datetime.date(2024, 1, 1),
        np.complex128(1j),
        2**70,
        -(2**70),
        "file \udce9",
        np.longdouble(1),
        np.bytes_(b"abc"),
    ],
    ids=repr,
)
def test_what_is_let_through_can_be_sent_and_stored(odd: Any) -> None:
    """What can't travel, or stand in a manifest, is refused where it is reported, by its name."""
    try:
        metrics = plain_metrics({"odd": odd})
    except TypeError as error:
        assert "'odd'" in str(error)  # noqa: PT017  # either outcome is fine, a third is not
    else:
        assert FrameBuffer().feed(pack(metrics)) == [metrics]
        assert json.loads(json.dumps(metrics)) == metrics


@pytest.mark.parametrize(
    "call",
    [
        lambda: polytrain.report({"loss": 1}),
        polytrain.get_checkpoint,
        polytrain.get_context,
        polytrain.get_dataset_shard,
        polytrain.heartbeat,
    ],
    ids=["report", "get_checkpoint", "get_context", "get_dataset_shard", "heartbeat"],
)
def test_outside_a_training_function_nothing_can_be_reported(
    call: Any, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    with pytest.raises(NotInWorkerError, match=rf"{name}\(\) works only inside a training func"):
        call()


def test_metrics_that_no_journal_could_hold_are_refused_when_they_are_reported() -> None:
    metrics: Any = 1
    for _ in range(96):
        metrics = {"a": metrics}
    assert plain_metrics({"deep": metrics}) == {"deep": metrics}
    many = DraftReports()
    for step in range(16):
        many.add(MetricsReported(step=step, metrics={"deep": metrics}), "")
    assert many.text(1)
    with pytest.raises(ValueError, match="nested in more than 100 levels"):
        plain_metrics({"deep": {"a": metrics}})


def test_metrics_that_contain_themselves_are_refused_in_a_sentence() -> None:
    metrics: dict[str, Any] = {"loss": 1.0}
    metrics["all"] = metrics
    with pytest.raises(ValueError, match="one of them contains itself"):
        plain_metrics(metrics)


def test_a_string_that_isnt_unicode_is_refused_as_such() -> None:
    with pytest.raises(TypeError, match=r"'file' is '\\udcff', which isn't valid Unicode"):
        plain_metrics({"file": b"\xff".decode(errors="surrogateescape")})
    for metrics in ({"\udcff": 1.0}, {"of": {"\udcff": 1.0}}):
        with pytest.raises(TypeError, match=r"named '\\udcff', which isn't valid Unicode"):
            plain_metrics(metrics)
