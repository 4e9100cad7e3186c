"""Every argument of Keras's `fit` and every callback on torch: two workers against one process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from tests import keras_cases
from tests.e2e.torch_runs import KERAS_ON_TORCH, TorchWith
from tests.e2e.torch_tables import table
from tests.keras_cases import shown
from tests.plugin_torch import keras_rows
from tests.plugin_torch.keras_rows import ARGUMENTS, CASES, OPTIONS

from polytrain.testing.local_world import run_world

# Workers can't import the tests.
cloudpickle.register_pickle_by_value(keras_cases)
cloudpickle.register_pickle_by_value(keras_rows)

NAMES = [name for name in CASES if name != "`TensorBoard`" or find_spec("tensorboard")]

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """What two workers and plain Keras in one process end in."""
    path = tmp_path_factory.mktemp("worlds")

    def of_rank_0(size: int) -> Found:
        record = run_world(
            TorchWith(timeout_s=90, libraries=(KERAS_ON_TORCH,)),
            data=pa.table({"x": [1.0] * size}),
            path=path / f"world{size}",
            world_size=size,
            training_function=keras_rows.train,
            training_config={"names": NAMES, "path": str(path)},
            seconds=240,
        )
        failures = [str(rank.failure) for rank in record.ranks if rank.failure]
        assert not failures, "\n".join(failures)
        weights = [
            {name: each.get("weights") for name, each in rank.reports[0].metrics["found"].items()}
            for rank in record.ranks
        ]
        assert weights[0] == weights[-1]
        metrics: Found = record.ranks[0].reports[0].metrics["found"]
        return metrics

    return of_rank_0(2), of_rank_0(1)


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_end_where_one_process_ends(found: tuple[Found, Found], name: str) -> None:
    ours, alone = (each.get(name, {}) for each in found)
    tolerance = 2e-2 if "float16" in name else 1e-4
    verdict = shown(ours, alone, relative=tolerance, absolute=tolerance)
    assert verdict == CASES[name].verdict, (ours, alone)


def test_the_table_tells_what_the_sweep_shows() -> None:
    rows = table("keras.md", "argument, option or callback", column=2)
    found = {name.replace("`", ""): case.verdict for name, case in CASES.items()}
    assert {name.replace("`", ""): verdict for name, verdict in rows.items()} == found


def test_nothing_is_left_out() -> None:
    """The names are those of the installed Keras, which this process doesn't import on torch."""
    pytest.importorskip("keras")
    keras_cases.assert_nothing_is_left_out(ARGUMENTS)
    assert not OPTIONS.keys() & ARGUMENTS.keys()
