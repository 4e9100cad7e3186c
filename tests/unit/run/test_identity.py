"""What makes a run that one: what may change between two drivers, and what is refused by name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polytrain import DataConfig
from polytrain.backends.reference import Reference
from polytrain.config.run_spec import RunSpec
from polytrain.data.plan.position import COLUMNS, ROWS
from polytrain.run.identity import (
    content_differences,
    data_differences,
    differences,
    identity_of,
    options_of,
    with_start_of,
)
from polytrain.text import strict_json
from polytrain_plugins import Backend, Problem


@dataclass(frozen=True, kw_only=True)
class Tunable(Reference):
    """A backend with an option that can be anything."""

    name: ClassVar[str] = "tunable"

    params: Any = None


def identity(
    backend: Backend | None = None,
    *,
    function: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | None = None,
    datasets: Mapping[str, DataConfig] | None = None,
    facts: Mapping[str, Mapping[str, str]] | None = None,
    start: str | None = None,
) -> dict[str, Any]:
    return identity_of(
        RunSpec(
            backend=backend or Tunable(),
            train_loop_per_worker=function,
            train_loop_config=config,
        ),
        datasets={} if datasets is None else datasets,
        facts={} if facts is None else facts,
        start=start,
        salt="salt",
    )


def changes(
    before: Mapping[str, Any], now: Mapping[str, Any], *, mutable_on_resume: Iterable[str] = ()
) -> dict[str, Problem]:
    """What has changed since a run was begun, whose identity stands in its journal."""
    written = json.loads(json.dumps(before))
    found = list(differences(written, now, mutable_on_resume=mutable_on_resume))
    assert all("another name" in problem.remedy for problem in found)
    assert len({problem.field for problem in found}) == len(found)
    return {problem.field: problem for problem in found}


options = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@example(params=math.nan, rounds=1, seed=0)
@given(params=options, rounds=st.integers(1, 100), seed=st.integers())
def test_the_same_again_is_the_same_run(params: Any, rounds: int, seed: int) -> None:
    def asked() -> dict[str, Any]:
        backend = Tunable(params=params, rounds=rounds)
        data = {"train": DataConfig(shuffle=True, seed=seed), "valid": DataConfig()}
        return identity(backend, datasets=data)

    assert changes(asked(), asked()) == {}


def test_objects_of_a_framework_are_known_by_their_type() -> None:
    before = identity(Tunable(params={"callbacks": [object()], "eta": 0.1}))
    assert changes(before, identity(Tunable(params={"callbacks": [object()], "eta": 0.1}))) == {}
    other = identity(Tunable(params={"callbacks": [Fraction()], "eta": 0.1}))
    found = changes(before, other)["params"].what
    assert "builtins.object" in found
    assert "Fraction" in found
    assert "eta" not in found, "what is the same isn't reported"


class Fraction:
    """A type of a user's own."""


def test_a_changed_option_is_reported_with_both_values() -> None:
    before = identity(Tunable(learning_rate=0.1, label="y"))
    now = identity(Tunable(learning_rate=0.5, label="z"))
    found = changes(before, now)
    assert found.keys() == {"learning_rate", "label"}
    assert "0.1" in found["learning_rate"].what
    assert "0.5" in found["learning_rate"].what


def test_an_entry_of_an_option_is_reported_without_the_others() -> None:
    before = identity(Tunable(params={"eta": 0.1, "depth": 3, "gone": 1}))
    now = identity(Tunable(params={"eta": 0.1, "depth": 4, "new": 2}))
    what = changes(before, now)["params"].what
    assert "{'depth': 3, 'gone': 1}" in what
    assert "{'depth': 4, 'new': 2}" in what


def test_an_option_may_change_if_the_backend_says_so() -> None:
    before, now = identity(Tunable(rounds=3)), identity(Tunable(rounds=5))
    assert changes(before, now, mutable_on_resume={"rounds"}) == {}
    assert changes(before, now).keys() == {"rounds"}


def test_an_option_that_another_version_has_counts_by_its_default() -> None:
    now = identity(Tunable())
    before = {**now, "options": {k: v for k, v in now["options"].items() if k != "params"}}
    assert changes(before, now) == {}, "None is no change"
    assert changes(before, identity(Tunable(params=3))).keys() == {"params"}


def test_another_backend_is_all_that_is_reported() -> None:
    [problem] = changes(identity(Tunable(params=3)), identity(Reference(rounds=7))).values()
    assert problem.field == "backend"
    assert "'tunable'" in problem.what
    assert "'reference'" in problem.what


@pytest.mark.parametrize("before", [True, False])
def test_with_or_without_a_training_function_is_another_run(before: bool) -> None:
    was, now = (identity(function=print if has else None) for has in (before, not before))
    found = changes(was, now)
    [problem] = found.values()
    assert problem.field == "train_loop_per_worker"
    was = "started with a training function" if before else "started with none"
    assert was in problem.what


def test_other_data_sets_are_reported_by_their_names() -> None:
    one = identity(datasets={"train": DataConfig(), "valid": DataConfig()})
    other = identity(datasets={"train": DataConfig()})
    assert "were train, valid, now they are train" in changes(one, other)["datasets"].what
    assert "were train, now they are none" in changes(other, identity())["datasets"].what


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shuffle", True),
        ("shuffle", "window"),
        ("seed", 7),
        ("remainder", "drop"),
        ("group", "query"),
        ("window_rows", 100),
    ],
)
def test_another_order_of_the_rows_is_reported(name: str, value: Any) -> None:
    before = identity(datasets={"train": DataConfig(), "valid": DataConfig()})
    changed = DataConfig(**{name: value})
    found = changes(before, identity(datasets={"train": changed, "valid": DataConfig()}))
    [problem] = found.values()
    assert problem.field == f"dataset_config['train'].{name}"
    assert repr(value) in problem.what


def test_what_is_read_of_a_row_may_change() -> None:
    """The rows' order is the same."""
    before = identity(datasets={"train": DataConfig()})
    changed = DataConfig(columns=["x"], transform=lambda batch: batch)
    assert changes(before, identity(datasets={"train": changed})) == {}


def test_options_that_are_known_in_full_are_those_that_were_given() -> None:
    given = Tunable(params={"eta": 0.1, "missing": math.inf}, rounds=3, label="y")
    known = options_of(json.loads(json.dumps(identity(given))))
    assert Tunable(**known) == given


@pytest.mark.parametrize("params", [Fraction(), [1, Fraction()], {"deep": {"er": (Fraction(),)}}])
def test_options_that_hold_an_object_are_not_known_in_full(params: Any) -> None:
    known = options_of(json.loads(json.dumps(identity(Tunable(params=params)))))
    assert known.keys() == {"rounds", "label", "learning_rate"}


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels else []


@pytest.mark.parametrize(
    "value", [10**400, -(10**5000), [1, 2**1024], nested(150)], ids=["large", "long", "in", "deep"]
)
def test_what_no_journal_can_hold_is_there_by_its_type(value: Any) -> None:
    written = {"identity": identity(Tunable(params={"of": value}), config={"of": value})}
    assert strict_json.loads(strict_json.dumps(written)) == written
    assert options_of(written["identity"]).keys() == {"rounds", "label", "learning_rate"}
    assert written["identity"]["content"]["objects"].keys() == {"params", "train_loop_config"}


def train(config: dict[str, Any]) -> float:
    rate: float = config["lr"] * 2
    return rate


def train_otherwise(config: dict[str, Any]) -> float:
    rate: float = config["lr"] * 3
    return rate


def changed_content(**now: Any) -> dict[str, str]:
    """What differs from a finished run, whose identity stands in its journal."""
    begun: dict[str, Any] = {
        "backend": Tunable(params={"objective": train}),
        "function": train,
        "config": {"lr": 0.1, "layers": [3, 4]},
        "datasets": {"train": DataConfig(transform=train)},
        "facts": {"train": {ROWS: "4", COLUMNS: "ab", "column 'x'": "cd"}},
        "start": "/pretrained",
    }
    before, asked = identity(**begun), identity(**(begun | now))
    assert changes(before, asked, mutable_on_resume=("params",)) == {}, (
        "an unfinished run is resumed"
    )
    written = json.loads(json.dumps(before))
    found = list(content_differences(written, asked))
    assert all("if_finished='new'" in problem.remedy for problem in found)
    return {problem.field: problem.what for problem in found}


@pytest.mark.parametrize(
    ("now", "fields"),
    [
        ({}, []),
        ({"function": train_otherwise}, ["train_loop_per_worker"]),
        ({"config": {"lr": 0.2, "layers": [3, 4]}}, ["train_loop_config"]),
        ({"backend": Tunable(params={"objective": train_otherwise})}, ["params"]),
        (
            {"datasets": {"train": DataConfig(transform=train_otherwise)}},
            ["dataset_config['train'].transform"],
        ),
        (
            {"facts": {"train": {ROWS: "4", COLUMNS: "ab", "column 'x'": "ce"}}},
            ["datasets['train']"],
        ),
        (
            {"facts": {"train": {ROWS: "4", COLUMNS: "ac", "column 'x'": "cd"}}},
            ["datasets['train']"],
        ),
        (
            {"function": train_otherwise, "config": None},
            ["train_loop_config", "train_loop_per_worker"],
        ),
        ({"start": "/another"}, ["restore_from"]),
        ({"start": None}, ["restore_from"]),
    ],
)
def test_other_content_than_a_finished_run_had_is_named(
    now: dict[str, Any], fields: list[str]
) -> None:
    assert list(changed_content(**now)) == fields


def test_a_resumed_run_has_the_starting_point_of_its_first_driver() -> None:
    begun, resumed = identity(start="/pretrained"), identity(start="/another")
    assert with_start_of(resumed, begun) == begun


def test_other_rows_than_a_checkpoint_s_are_named() -> None:
    before = identity(facts={"train": {ROWS: "4", COLUMNS: "a", "column 'x'": "b"}, "valid": {}})
    now = {ROWS: "5", COLUMNS: "a", "column 'x'": "c"}
    [problem] = data_differences(before, identity(facts={"train": now, "valid": {}}))
    assert problem.field == "datasets['train']"
    assert problem.what.endswith("(number of rows 4 then, 5 now; other column 'x')")
    assert "under another name: with restore_from" in problem.remedy


def test_a_run_that_is_resumed_may_read_other_columns() -> None:
    before = identity(facts={"train": {ROWS: "4", COLUMNS: "a", "column 'x'": "b"}})
    now = identity(facts={"train": {ROWS: "4", COLUMNS: "c", "column 'y'": "d"}})
    assert list(data_differences(before, now)) == []


def test_a_changed_value_of_the_configuration_is_reported() -> None:
    found = changed_content(config={"lr": 0.2, "layers": [3, 4]})["train_loop_config"]
    assert found == "the run was trained with {'lr': 0.1}, now it is {'lr': 0.2}"


def test_a_function_within_the_configuration_counts() -> None:
    was, now = (identity(config={"f": function}) for function in (train, train_otherwise))
    assert [problem.field for problem in content_differences(was, now)] == ["train_loop_config"]


@dataclass
class Settings:
    """A config that is an object."""

    weights: Any


class Schedule:
    """An object of a user's own."""

    def __init__(self, rates: Any) -> None:
        self.rates = rates


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"w": np.zeros(3)}, {"w": np.ones(3)}),
        ({"w": [1, np.zeros(3)]}, {"w": [1, np.ones(3)]}),
        ({"w": Schedule([1, 2])}, {"w": Schedule([1, 3])}),
        ({"w": Schedule(Schedule(1))}, {"w": Schedule(Schedule(2))}),
        ({"w": {1, 2}}, {"w": {1, 3}}),
        (Settings(np.zeros(3)), Settings(np.ones(3))),
    ],
)
def test_the_content_of_an_object_in_the_configuration_counts(one: Any, other: Any) -> None:
    before, now = identity(config=one), identity(config=other)
    written = json.loads(json.dumps(before))
    assert list(content_differences(written, identity(config=copy.deepcopy(one)))) == []
    [problem] = content_differences(written, now)
    assert problem.field == "train_loop_config"
    assert "object" in problem.what


def test_a_script_s_class_is_the_same_where_the_script_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = identity(Tunable(params=[Fraction()]))
    monkeypatch.setattr(Fraction, "__module__", "__main__")
    now = identity(Tunable(params=[Fraction()]))
    assert changes(before, now) == {}
    assert list(content_differences(before, now)) == []
