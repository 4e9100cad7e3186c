"""Predictions for any data set, by whoever has time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.e2e.boosters import BACKENDS, ROWS, a_table, fit

import polytrain.prediction.predict
from polytrain import DataConfig, InvalidJobError, Result, RunConfig, ScalingConfig, Trainer
from polytrain.backends.reference import Reference
from polytrain_plugins import Capabilities, UnsupportedCapabilityError

both = pytest.mark.parametrize("backend", BACKENDS)

pytestmark = pytest.mark.on_ray


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return a_table()


@pytest.fixture(params=BACKENDS)
def result(request: pytest.FixtureRequest, quiet: RunConfig, table: pa.Table) -> Result:
    return fit(quiet, table, 0, backend=request.param)


# In `make test` once: what the workers do with their parts is the same for every framework.
@pytest.mark.sweep(one_in=2)
def test_a_table_is_predicted_here_and_files_by_workers(
    result: Result, table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = result.predict(table)
    assert here.shape == (ROWS,)
    label = table.column("y").to_numpy()
    assert np.mean((here > 0.5) == label) > 0.7
    for number in range(3):
        pq.write_table(table.slice(number * 2000, 2000), tmp_path / f"{number}.parquet")
    monkeypatch.setattr(polytrain.prediction.predict, "PART_ROWS", 900)
    assert result.predict(str(tmp_path), num_workers=2).tolist() == here.tolist()
    assert result.predict(table, num_workers=1).tolist() == here.tolist()


def test_columns_and_categories_are_the_models(result: Result, table: pa.Table) -> None:
    expected = result.predict(table)
    # Another order, no label, and other codes for the same strings.
    other = table.select(["kind", "x4", "x3", "x2", "x1", "x0"])
    turned = pa.DictionaryArray.from_arrays(
        pa.array(["fedcba".index(kind) for kind in other.column("kind").to_pylist()]),
        pa.array(list("fedcba")),
    )
    assert result.predict(other.set_column(0, "kind", turned)).tolist() == expected.tolist()


def test_what_the_model_has_never_seen_is_missing(result: Result, table: pa.Table) -> None:
    few = table.slice(0, 50)
    kind = few.schema.get_field_index("kind")
    new = few.set_column(kind, "kind", pa.array(["new"] * 50))
    none = few.set_column(kind, "kind", pa.array([None] * 50, pa.string()))
    assert result.predict(new).tolist() == result.predict(none).tolist()


@both
def test_options_are_the_frameworks(quiet: RunConfig, table: pa.Table, backend: str) -> None:
    options: dict[str, Any] = {"xgboost": {"output_margin": True}, "lightgbm": {"raw_score": True}}
    result = fit(quiet, table, 0, backend=backend)
    margin = result.predict(table, **options[backend])
    assert 1 / (1 + np.exp(-margin)) == pytest.approx(result.predict(table), rel=1e-5)
    with pytest.raises(InvalidJobError, match=r"pred_leav: .*Did you mean 'pred_leaf'\?"):
        result.predict(table, pred_leav=True)


def test_a_column_that_is_missing_is_named(result: Result, table: pa.Table) -> None:
    with pytest.raises(ValueError, match=r"no column 'x3', which the model needs"):
        result.predict(table.drop_columns(["x3"]))


def test_an_index_is_a_key_and_no_feature(
    quiet: RunConfig, table: pa.Table, tmp_path: Path
) -> None:
    frame = table.slice(0, 300).to_pandas()
    frame.index = pd.Index([f"r{row}" for row in range(300)], name="id")
    frame.to_parquet(tmp_path / "a.parquet")
    result = fit(quiet, str(tmp_path), 0, backend="xgboost")
    result.predict(str(tmp_path), output=tmp_path / "out", keep=["id"], num_workers=0)
    written = pq.read_table(tmp_path / "out")
    assert written.column("id").to_pylist() == frame.index.tolist()
    assert written.column("prediction").to_pylist() == result.predict(frame).tolist()
    assert result.load_model().feature_names == frame.columns.drop("y").tolist()


@both
def test_rows_go_through_the_transform_of_the_training(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    def turned(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x0": -batch["x0"], "x1": 1 / batch["x1"]}

    config = {"train": DataConfig(transform=turned)}
    result = fit(quiet, table, 0, backend=backend, dataset_config=config)
    with pytest.raises(InvalidJobError, match=r"transform: .* transformed=True"):
        result.predict(table)
    ready = pa.table(turned({name: table[name].to_numpy() for name in table.column_names}))
    expected = fit(quiet, ready, 0, backend=backend).predict(ready)
    assert result.predict(table, transform=turned).tolist() == expected.tolist()


def test_what_is_no_data_set_is_refused(result: Result) -> None:
    with pytest.raises(InvalidJobError, match=r"data: .*is not a data set"):
        result.predict(42)
    with pytest.raises(InvalidJobError, match="num_workers: -1 is not a number of workers"):
        result.predict({"x": [1.0]}, num_workers=-1)


class Mute(Reference):
    """A backend that trains, and doesn't predict."""

    capabilities = Capabilities(declarative=True)


def test_a_backend_that_does_not_predict_says_so(quiet: RunConfig) -> None:
    data = {"x": [1.0, 2.0, 3.0], "label": [0.0, 1.0, 1.0]}
    result = Trainer(
        Mute(label="label"),
        datasets={"train": data},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=quiet,
    ).fit()
    with pytest.raises(UnsupportedCapabilityError, match=r"load_model\(\)"):
        result.predict(data)


def test_pipelines_of_ray_are_predicted_in_their_order(quiet: RunConfig, table: pa.Table) -> None:
    import ray

    result = fit(quiet, table, 0, backend="xgboost")
    ids = table.append_column("id", pa.array(range(ROWS)))
    pipeline = ray.data.from_arrow([ids.slice(n, 1000) for n in range(0, ROWS, 1000)])
    # Two of its processes, which need not end in the order of their blocks.
    pipeline = pipeline.map_batches(lambda rows: rows, batch_format="pyarrow", concurrency=2)
    output = Path(result.path).parent / "predictions"
    result.predict(pipeline, output=output, keep=["id"], num_workers=2, rows_per_file=900)
    stored = pq.read_table(output)
    assert stored["id"].to_pylist() == list(range(ROWS))
    assert stored["prediction"].to_numpy().tolist() == result.predict(table).tolist()
