"""Whatever is wrong with a booster's data is told once, by name, and isn't tried again."""

from __future__ import annotations

import dataclasses
import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.e2e.boosters import BACKENDS, fit, model_of

from polytrain import (
    BadDataError,
    FailureConfig,
    InvalidJobError,
    Result,
    RunConfig,
    TrainingFailedError,
)

both = pytest.mark.parametrize("backend", BACKENDS)
ROWS = 90
NAN, INF = float("nan"), float("inf")

OBJECTIVES = {
    "regression": {"xgboost": "reg:squarederror", "lightgbm": "regression"},
    "binary": {"xgboost": "binary:logistic", "lightgbm": "binary"},
    "classes": {"xgboost": "multi:softprob", "lightgbm": "multiclass"},
    "ranking": {"xgboost": "rank:ndcg", "lightgbm": "lambdarank"},
}
MARGIN = {"xgboost": "base_margin", "lightgbm": "init_score"}
QUERY = {"xgboost": "qid", "lightgbm": "group"}


def a_table(**more: Any) -> pa.Table:
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    columns = {f"x{i}": x[:, i] for i in range(3)}
    return pa.table({**columns, "y": (x.sum(axis=1) > 0) * 1.0, **more})


def with_value(column: str, value: Any) -> pa.Table:
    """One of the last rows, which are another rank's than the first, has another value."""
    columns = a_table(w=np.ones(ROWS)).to_pydict()
    columns[column][ROWS - 9] = value
    return pa.table(columns)


def trained(
    quiet: RunConfig,
    table: Any,
    num_workers: int = 0,
    *,
    backend: str,
    objective: str = "regression",
    params: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    few = {"min_data_in_leaf": 2} if backend == "lightgbm" else {"max_depth": 3}
    params = {"objective": OBJECTIVES[objective][backend], **few, **(params or {})}
    again = dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=3))
    rounds = options.pop("num_boost_round", 2)
    return fit(
        again, table, num_workers, backend=backend, params=params, num_boost_round=rounds, **options
    )


def refusal(quiet: RunConfig, table: Any, num_workers: int = 0, **options: Any) -> str:
    """What the user is told of rows, by one attempt."""
    with pytest.raises(TrainingFailedError) as caught:
        trained(quiet, table, num_workers, **options)
    error = caught.value
    assert isinstance(error.__cause__, BadDataError)
    assert error.result is not None
    assert error.result.restarts == 0
    message = str(error)
    assert message.count(str(error.__cause__)) == 1, "reported more than once"
    assert "Traceback" not in message
    return str(error.__cause__)


def refusal_at_once(quiet: RunConfig, table: Any, **options: Any) -> str:
    """What the user is told before anything is started."""
    with pytest.raises(InvalidJobError) as caught:
        trained(quiet, table, **options)
    [problem] = caught.value.problems
    return str(problem)


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("num_workers", [1, 3])
def test_rows_of_one_rank_are_reported_by_all(
    quiet: RunConfig, backend: str, num_workers: int, tmp_path: Path
) -> None:
    table, path = with_value("y", NAN), tmp_path / "rows.parquet"
    pq.write_table(table, path)
    expected = (
        "label: in 1 of 90 rows of 'train' the column 'y' has no value (null or NaN). "
        "Leave such rows out, or give them a value"
    )
    assert refusal(quiet, path, num_workers, backend=backend) == expected
    assert refusal_at_once(quiet, table, num_workers=num_workers, backend=backend) == expected


@both
@pytest.mark.parametrize("missing", [NAN, None])
def test_labels_without_a_value(quiet: RunConfig, backend: str, missing: Any) -> None:
    bad = with_value("y", missing)
    assert "in 1 of 90 rows of 'train'" in refusal_at_once(quiet, bad, backend=backend)
    valid = {"valid": bad}
    found = refusal_at_once(quiet, with_value("y", 1.0), backend=backend, datasets=valid)
    assert "in 1 of 90 rows of 'valid'" in found


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize(
    ("objective", "label"), [("binary", 2), ("binary", -1), ("classes", 3), ("classes", 0.5)]
)
def test_labels_that_the_objective_does_not_take(
    quiet: RunConfig, backend: str, objective: str, label: float
) -> None:
    options: dict[str, Any] = {"backend": backend, "objective": objective}
    if objective == "classes":
        options["params"] = {"num_class": 3}
    found = refusal(quiet, with_value("y", label), **options)
    assert f"'{OBJECTIVES[objective][backend]}'" in found
    assert f"(such as {label:g})" in found
    found = refusal(
        quiet, a_table(w=np.ones(ROWS)), datasets={"v": with_value("y", label)}, **options
    )
    assert "of 'v'" in found


BAD_LABELS = [
    ("xgboost", {"objective": "reg:gamma"}, 0, "numbers above 0"),
    ("xgboost", {"objective": "reg:squaredlogerror"}, -1, "numbers above -1"),
    ("xgboost", {"objective": "rank:ndcg"}, 32, "whole numbers from 0 to 31"),
    ("xgboost", {"objective": "rank:map"}, 2, "0 and 1"),
    ("lightgbm", {"objective": "gamma"}, -1, "numbers from 0"),
    ("lightgbm", {"objective": "lambdarank"}, 31, "whole numbers from 0 to 30"),
    ("lightgbm", {"objective": "lambdarank", "label_gain": [0, 1]}, 2, "0 and 1"),
]


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("backend", "params", "label", "takes"), BAD_LABELS)
def test_labels_that_only_some_objectives_take(
    quiet: RunConfig, backend: str, params: dict[str, Any], label: float, takes: str
) -> None:
    """The framework itself would fail on the one rank that has them."""
    labels = np.where(np.arange(ROWS) == ROWS - 1, label, 1.0)
    table = a_table(q=np.arange(ROWS) // 9).set_column(3, "y", pa.array(labels))
    ranks = "rank" in params["objective"]
    options = {QUERY[backend]: "q"} if ranks else {}
    found = refusal(quiet, table, backend=backend, params=params, **options)
    assert f"which takes {takes} (such as {label:g})" in found
    if params["objective"] == "rank:ndcg":
        trained(quiet, table, backend=backend, params={**params, "ndcg_exp_gain": False}, **options)


@both
def test_one_label_for_all_rows_is_worth_a_warning(
    quiet: RunConfig, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = a_table().set_column(3, "y", pa.array([1.0] * ROWS))
    trained(quiet, table, backend=backend)
    messages = [record for record in caplog.records if "the same label" in record.message]
    assert len(messages) == 1


@both
def test_a_question_mark_that_makes_numbers_categories_is_worth_a_warning(
    quiet: RunConfig, backend: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{n}.5,{'?' if n == 7 else n},{n % 2}" for n in range(ROWS)]
    path.write_text("\n".join(["a,b,y", *rows]))
    trained(quiet, path, backend=backend)
    [messages] = [record.getMessage() for record in caplog.records if "is text" in record.message]
    assert messages.startswith("The column 'b' of 'train' is text")
    assert "89 of 90 are numbers; the others are '?'" in messages


@both
def test_text_where_the_model_knows_numbers_is_reported_when_it_predicts(
    quiet: RunConfig, backend: str
) -> None:
    table = a_table()
    result = trained(quiet, table, backend=backend)
    column = table.column_names.index("x0")
    numbers = [str(number) for number in table["x0"].to_pylist()]
    as_text = table.set_column(column, "x0", pa.array(numbers))
    assert result.predict(as_text).tolist() == result.predict(table).tolist()
    with pytest.raises(ValueError, match="column 'x0' holds text, such as '\\?'"):
        result.predict(table.set_column(column, "x0", pa.array(["?", *numbers[1:]])))


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize(
    ("objective", "options"), [("binary", {"weight": "w"}), ("ranking", {"query": "q"})]
)
def test_categories_of_pandas_are_labels_weights_and_queries(
    quiet: RunConfig, backend: str, objective: str, options: dict[str, str]
) -> None:
    names = {"query": QUERY[backend]}
    options = {names.get(option, option): column for option, column in options.items()}
    columns = {column: np.arange(ROWS) // 10 for column in options.values()}
    table = a_table(**columns)
    frame = table.to_pandas().astype(dict.fromkeys(["y", *columns], "category"))
    predicted = [
        trained(quiet, data, backend=backend, objective=objective, **options).predict(data)
        for data in (table, frame)
    ]
    assert predicted[0].tolist() == predicted[1].tolist()


NARROW = {
    "float16": lambda numbers: pa.array(np.asarray(numbers, np.float16)),
    "decimal32": lambda numbers: pa.array([Decimal(int(n)) for n in numbers], pa.decimal32(6, 1)),
}
"""Types for which Arrow can't sort, or find equal values."""


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("objective", ["regression", "ranking"])
def test_labels_weights_scores_and_queries_may_be_of_narrow_types(
    quiet: RunConfig, backend: str, objective: str, kind: str
) -> None:
    query = np.arange(ROWS) // 10
    numbers = {"y": query % 3, "w": 1 + query % 2, "m": query % 4, "q": query}
    options = {"weight": "w", MARGIN[backend]: "m"}
    if objective == "ranking":
        options[QUERY[backend]] = "q"
    else:
        del numbers["q"]
    x = a_table().select(["x0", "x1", "x2"]).to_pydict()
    wide, narrow = (
        pa.table({**x, **{name: make(each) for name, each in numbers.items()}})
        for make in (pa.array, NARROW[kind])
    )
    models = [
        model_of(trained(quiet, table, backend=backend, objective=objective, **options))
        for table in (wide, narrow)
    ]
    assert models[0] == models[1]


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("kind", NARROW)
def test_categories_may_be_of_narrow_types(quiet: RunConfig, backend: str, kind: str) -> None:
    codes = pa.array(np.arange(ROWS) % 4, pa.int8())
    predicted = []
    for make in (pa.array, NARROW[kind]):
        categories = pa.DictionaryArray.from_arrays(codes, make([7.0, 5.0, 6.0, 8.0]))
        table = a_table(z=categories)
        result = trained(quiet, table, backend=backend)
        predicted.append(result.predict(table).tolist())
    assert predicted[0] == predicted[1]


@both
@pytest.mark.parametrize(
    ("weight", "what"), [(-1.0, "is negative (such as -1)"), (INF, "infinite")]
)
def test_weights(quiet: RunConfig, backend: str, weight: float, what: str) -> None:
    found = refusal(quiet, with_value("w", weight), backend=backend, weight="w")
    assert found.startswith("weight: in 1 of 90 rows")
    assert what in found


@both
def test_weights_of_which_none_is_above_0(quiet: RunConfig, backend: str) -> None:
    found = refusal(quiet, a_table(w=np.zeros(ROWS)), backend=backend, weight="w")
    assert "in 90 of 90 rows of 'train' the column 'w' is 0" in found


def test_xgboost_weighs_queries(quiet: RunConfig) -> None:
    query = np.arange(ROWS) // 9
    options = {"backend": "xgboost", "objective": "ranking", "qid": "q", "weight": "w"}
    weight = 1.0 + query
    trained(quiet, a_table(q=query, w=weight), **options)
    weight[[1, ROWS - 1]] = 5.5
    found = refusal(quiet, a_table(q=query, w=weight), 2, **options)
    assert found.startswith("weight: in 2 of 90 rows of 'train' the column 'w' isn't that of the")
    assert "LightGBM" in found


@both
@pytest.mark.parametrize("missing", [NAN, None])
def test_weights_and_first_scores_without_a_value(
    quiet: RunConfig, backend: str, missing: Any
) -> None:
    for option in ("weight", MARGIN[backend]):
        found = refusal_at_once(quiet, with_value("w", missing), backend=backend, **{option: "w"})
        assert found.startswith(f"{option}: in 1 of 90 rows of 'train' the column 'w' has no value")


@both
@pytest.mark.parametrize("dataset", ["train", "valid"])
@pytest.mark.parametrize(
    ("queries", "what"),
    [
        (np.arange(ROWS) % 7, "the rows of group 0 of the column 'q' don't lie together"),
        ([*range(ROWS - 1), None], "1 row has no value in the column 'q'"),
        ([*np.arange(ROWS - 1.0), NAN], "1 row has no value in the column 'q'"),
    ],
    ids=["torn", "null", "NaN"],
)
def test_queries(quiet: RunConfig, backend: str, dataset: str, queries: Any, what: str) -> None:
    datasets = {"train": a_table(q=np.arange(ROWS) // 9), "valid": a_table(q=np.arange(ROWS) // 9)}
    datasets[dataset] = a_table(q=queries)
    found = refusal_at_once(
        quiet,
        datasets.pop("train"),
        datasets=datasets,
        backend=backend,
        objective="ranking",
        **{QUERY[backend]: "q"},
    )
    assert found.startswith(f"datasets['{dataset}']: {what}")


@pytest.mark.sweep(one_in=2)
@both
def test_columns_are_reported_by_their_names(
    quiet: RunConfig, backend: str, tmp_path: Path
) -> None:
    table = a_table()
    turned = table.select(["y", "x2", "x0", "x1"])
    for number, each in enumerate([table, turned]):
        pq.write_table(each, tmp_path / f"{number}.parquet")
    files = model_of(trained(quiet, str(tmp_path), backend=backend))
    assert files == model_of(trained(quiet, pa.concat_tables([table, table]), backend=backend))
    metrics = trained(quiet, table, backend=backend, datasets={"valid": turned}).metrics
    of_train, of_valid = metrics.values()
    assert of_valid == pytest.approx(of_train)


@both
@pytest.mark.parametrize(("change", "what"), [("less", "'x1'"), ("more", "'extra'")])
def test_a_column_too_few_or_too_many(
    quiet: RunConfig, backend: str, tmp_path: Path, change: str, what: str
) -> None:
    table = a_table()
    other = table.drop_columns(["x1"]) if change == "less" else a_table(extra=np.ones(ROWS))
    for number, each in enumerate([table, other]):
        pq.write_table(each, tmp_path / f"{number}.parquet")
    assert what in refusal_at_once(quiet, str(tmp_path), backend=backend)
    found = refusal_at_once(quiet, table, backend=backend, datasets={"valid": other})
    assert found.startswith("datasets['valid']: it ")
    assert what in found


UNUSUAL = {
    "NaN on the last rank": [*range(60), *[NAN] * 30],
    "NaN": [NAN] * ROWS,
    "null": pa.nulls(ROWS),
    "integers with nulls": [1, 2, None] * 30,
    "booleans with nulls": [True, False, None] * 30,
    "decimals with nulls": [Decimal("1.5"), Decimal(2), None] * 30,
    "int8": pa.array(np.arange(ROWS), pa.int8()),
    "uint64": pa.array(np.arange(ROWS), pa.uint64()),
    "float16 with nulls": pa.array([1.5, 2.5, None] * 30, pa.float16()),
    "strings with nulls": ["a", "b", None] * 30,
    "strings on the first rank": [*["a", "b"] * 15, *[None] * 60],
    "strings of which there are none": pa.nulls(ROWS, pa.string()),
    "many strings": [f"k{i}" for i in range(ROWS)],
}


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_columns_are_trained_on(quiet: RunConfig, backend: str, kind: str) -> None:
    table = a_table(z=UNUSUAL[kind])
    result = trained(quiet, table, backend=backend, datasets={"valid": table})
    of_train, of_valid = result.metrics.values()
    assert of_valid == pytest.approx(of_train)
    assert result.predict(table).shape == (ROWS,)


@both
def test_unusual_columns_are_trained_on_by_several(quiet: RunConfig, backend: str) -> None:
    table = a_table(**{kind: values for kind, values in UNUSUAL.items()})
    several = trained(quiet, table, 3, backend=backend)
    assert model_of(several) == model_of(trained(quiet, table, backend=backend))


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize(
    "numbers", [np.arange(ROWS) % 4, np.arange(ROWS) % 4 + 0.5, [1.0, NAN, 2.0] * 30]
)
def test_numbers_can_be_categories(quiet: RunConfig, backend: str, numbers: Any) -> None:
    table = a_table(z=numbers)
    result = trained(quiet, table, backend=backend, categorical=["z"], datasets={"valid": table})
    of_train, of_valid = result.metrics.values()
    assert of_valid == pytest.approx(of_train)
    assert np.mean((result.predict(table) > 0.5) == table.column("y").to_numpy()) > 0.6


@both
@pytest.mark.parametrize(
    "value", [datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1), [1, 2], {"a": 1}, b"x"]
)
def test_columns_that_are_no_features(quiet: RunConfig, backend: str, value: Any) -> None:
    column = pa.array([value] * ROWS)
    found = refusal_at_once(quiet, a_table(z=column), backend=backend)
    assert f"'z' ({column.type})" in found
    assert "DataConfig(columns=[…])" in found


@pytest.mark.parametrize("dataset", ["train", "valid"])
def test_infinite_features_of_xgboosts(quiet: RunConfig, dataset: str) -> None:
    datasets = {"train": with_value("x0", 1.0), "valid": with_value("x0", 1.0)}
    datasets[dataset] = with_value("x1", -INF)
    train = datasets.pop("train")
    found = refusal(quiet, train, datasets=datasets, backend="xgboost")
    assert found.startswith(f"datasets['{dataset}']: in 1 of 90 rows")
    assert "'x1' is infinite" in found


@both
@pytest.mark.parametrize("categorical", [(), ("x1",)], ids=["number", "category"])
def test_infinity_where_train_has_whole_numbers(
    quiet: RunConfig, backend: str, categorical: tuple[str, ...]
) -> None:
    """The type of one data set says nothing of the values of another."""
    whole = a_table().set_column(1, "x1", pa.array(np.arange(ROWS) % 3))
    values = np.r_[np.arange(ROWS - 1) % 3, INF]
    options: dict[str, Any] = {
        "datasets": {"valid": whole.set_column(1, "x1", pa.array(values))},
        "categorical": categorical,
        "backend": backend,
    }
    if backend == "xgboost":
        assert "'x1' is infinite" in refusal(quiet, whole, **options)
    else:
        trained(quiet, whole, **options)


def test_infinite_features_of_lightgbms(quiet: RunConfig) -> None:
    """It takes them for very large ones."""
    trained(quiet, with_value("x1", INF), backend="lightgbm")


@both
def test_too_few_rows(quiet: RunConfig, backend: str) -> None:
    few = a_table().slice(0, 2)
    found = refusal_at_once(quiet, few, num_workers=3, backend=backend)
    assert "its 2 rows can't be divided among 3 workers" in found
    assert "it has no rows" in refusal_at_once(quiet, few.slice(0, 0), backend=backend)
    empty = {"valid": few.slice(0, 0)}
    found = refusal_at_once(quiet, few, backend=backend, datasets=empty)
    assert found.startswith("datasets['valid']: it has no rows")


@both
def test_too_few_queries(quiet: RunConfig, backend: str) -> None:
    table = a_table(q=np.arange(ROWS) // 45)
    options = {"backend": backend, "objective": "ranking", QUERY[backend]: "q"}
    found = refusal_at_once(quiet, table, num_workers=3, **options)
    assert "its 2 groups can't be divided among 3 workers" in found


def test_lightgbm_learns_nothing_from_one_row(quiet: RunConfig) -> None:
    found = refusal(quiet, a_table().slice(0, 1), backend="lightgbm")
    assert found.startswith("datasets['train']: it has one row")


def test_names_with_spaces_are_lightgbms_with_underscores(quiet: RunConfig) -> None:
    """It has them so in the model, with which a run goes on, and which predicts."""
    table = a_table().rename_columns(["x 0", "x1", "x 2", "y"])
    first = trained(quiet, table, backend="lightgbm", num_boost_round=2)
    assert first.load_model().feature_name() == ["x_0", "x1", "x_2"]
    gone_on = trained(
        quiet, table, backend="lightgbm", num_boost_round=4, restore_from=first.checkpoint
    )
    assert model_of(gone_on) == model_of(
        trained(quiet, table, backend="lightgbm", num_boost_round=4)
    )
    assert gone_on.predict(table).shape == (ROWS,)


@both
@pytest.mark.parametrize("kind", [pa.int64(), pa.float64()])
def test_large_whole_numbers_are_the_same_categories_as_floats(
    quiet: RunConfig, backend: str, kind: pa.DataType
) -> None:
    numbers = [4006381333931, 10**10, 7] * 30
    table = a_table(z=pa.array(numbers, kind), y=np.array([3.0, 0.0, 9.0] * 30))
    result = trained(quiet, table, backend=backend, categorical=["z"])
    other = pa.float64() if kind == pa.int64() else pa.int64()
    arrived = table.set_column(table.column_names.index("z"), "z", pa.array(numbers, other))
    assert result.predict(arrived).tolist() == result.predict(table).tolist()
