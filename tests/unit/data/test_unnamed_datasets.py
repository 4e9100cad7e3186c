"""Data that are passed as `datasets` without a name are one problem with the right call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from polytrain import DataConfig, InvalidJobError, Trainer
from polytrain.backends.reference import Reference

FRAME = pd.DataFrame({"x": [1.0, 2.0], "y": [1.0, 0.0]})


@pytest.mark.parametrize(
    ("datasets", "what"),
    [
        (FRAME, "a DataFrame"),
        (pa.Table.from_pandas(FRAME), "a Table"),
        (np.zeros((3, 2)), "an ndarray"),
        ("rows.parquet", "a str"),
        ([{"x": 1.0, "y": 0.0}], "a list"),
        ((FRAME, FRAME), "a tuple"),
        (5, "an int"),
        ({"x": np.zeros(3), "y": np.zeros(3)}, "a dict of columns"),
        ({"x": [1.0, 2.0], "y": [0.0, 1.0]}, "a dict of columns"),
    ],
)
@pytest.mark.parametrize("function", [None, lambda: None])
def test_data_without_a_name_are_one_problem(datasets: Any, what: str, function: Any) -> None:
    backend = Reference(label="y") if function is None else Reference()
    with pytest.raises(InvalidJobError) as raised:
        Trainer(backend, function, datasets=datasets)
    assert list(map(str, raised.value.problems)) == [
        f'datasets: it is {what}, not data sets by name. Pass datasets={{"train": …}}'
    ]


@pytest.mark.parametrize(
    ("datasets", "field"),
    [
        ({"train": np.zeros(3)}, "datasets['train']"),
        ({"train": [1.0, 2.0]}, "datasets['train']"),
        ({"valid": np.zeros((3, 2))}, "datasets['valid']"),
    ],
)
def test_a_named_data_set_that_is_wrong_is_no_dict_of_columns(datasets: Any, field: str) -> None:
    with pytest.raises(InvalidJobError) as raised:
        Trainer(Reference(), lambda: None, datasets=datasets)
    assert [problem.field for problem in raised.value.problems] == [field]


def test_a_named_data_set_without_a_chosen_column_is_no_dict_of_columns() -> None:
    with pytest.raises(InvalidJobError, match="'z'") as raised:
        Trainer(
            Reference(),
            lambda: None,
            datasets={"valid": FRAME},
            dataset_config=DataConfig(columns=["z"]),
        )
    assert [problem.field for problem in raised.value.problems] == ["datasets['valid']"]


def test_a_data_set_that_is_wrong_beside_others_is_named() -> None:
    with pytest.raises(InvalidJobError) as raised:
        Trainer(Reference(label="y"), datasets={"train": FRAME, "valid": np.zeros(3)})
    assert [problem.field for problem in raised.value.problems] == ["datasets['valid']"]


def test_the_name_of_a_data_set_is_text() -> None:
    with pytest.raises(InvalidJobError) as raised:
        Trainer(Reference(), lambda: None, datasets={0: FRAME})  # type: ignore[dict-item]  # wrong on purpose
    assert list(map(str, raised.value.problems)) == [
        'datasets: 0 is not the name of a data set. Give a text, for example {"train": …}'
    ]
