"""What a `Result` has of a run: its models, its files, and what its functions returned."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.fs as pafs
import pytest

import polytrain as train

X = np.arange(32.0)


@pytest.fixture(scope="module")
def boosted(tmp_path_factory: pytest.TempPathFactory) -> train.Result:
    """Three rounds with a checkpoint of each. The score makes the first one the best."""
    return train.make_trainer(
        "xgboost",
        label="y",
        num_boost_round=3,
        datasets={"train": {"x": X, "y": X * 2}},
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(
            name="run",
            storage_path=tmp_path_factory.mktemp("runs"),
            progress=False,
            checkpoint_config=train.CheckpointConfig(
                checkpoint_frequency=1, checkpoint_score_attribute="train-rmse"
            ),
        ),
    ).fit()


@pytest.mark.parametrize("read_again", [False, True])
def test_the_model_of_any_checkpoint(boosted: train.Result, read_again: bool) -> None:
    # Read again, the run itself knows how it ranks its checkpoints.
    result = train.Result.from_path(boosted.path) if read_again else boosted
    second = result.get_best_checkpoint("train-rmse", "min")
    rounds = {"best": 1, "newest": 3, second: 3, result.best_checkpoints[1][0]: 2}
    for wanted, expected in rounds.items():
        assert result.load_model(checkpoint=wanted).num_boosted_rounds() == expected
    assert result.load_model().num_boosted_rounds() == 3


def test_rows_are_predicted_with_any_checkpoint(boosted: train.Result) -> None:
    rows = {"x": X}
    first, last = (boosted.predict(rows, checkpoint=each) for each in ("best", "newest"))
    assert np.abs(first - X * 2).mean() > np.abs(last - X * 2).mean()
    assert np.array_equal(boosted.predict(rows), last)


def test_a_checkpoint_that_is_none_is_named(boosted: train.Result) -> None:
    with pytest.raises(ValueError, match=r"checkpoint: 'oldest' is no checkpoint.*'best'"):
        boosted.load_model("oldest")  # type: ignore[arg-type]  # the point


def test_a_damaged_checkpoint_is_not_loaded(boosted: train.Result, tmp_path: Path) -> None:
    copy = Path(boosted.best_checkpoints[0][0].to_directory(tmp_path / "copy"))
    model = next(copy.glob("*.ubj"))
    model.write_bytes(model.read_bytes()[:-1] + b"\0")
    with pytest.raises(train.CheckpointError, match="differs from what was committed"):
        boosted.load_model(train.Checkpoint(str(copy)))


def test_a_result_names_its_storage(boosted: train.Result) -> None:
    assert isinstance(boosted.filesystem, pafs.LocalFileSystem)
    files = boosted.filesystem.get_file_info(pafs.FileSelector(boosted.path))
    assert {"checkpoints", "journal.jsonl"} <= {each.base_name for each in files}


def test_a_result_names_the_file_system_that_its_run_was_given(tmp_path: Path) -> None:
    storage = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    result = train.DataParallelTrainer(
        lambda: train.report({"loss": 1.0}),
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(
            name="run", storage_path="runs", storage_filesystem=storage, progress=False
        ),
    ).fit()
    for each in (result, train.Result.from_path(result.path, storage)):
        assert each.filesystem.get_file_info(each.path).type == pafs.FileType.Directory


def returns_its_rank() -> dict[str, object]:
    rank = train.get_context().get_world_rank()
    train.report({"rank": rank})
    return {"rank": rank, "weights": np.full(2, rank), "pair": (rank, "a")}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_functions_return_is_kept_with_the_run(tmp_path: Path, num_workers: int) -> None:
    trainer = train.DataParallelTrainer(
        returns_its_rank,
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=train.RunConfig(name="run", storage_path=tmp_path, progress=False),
    )
    first = trainer.fit()
    for result in (first, trainer.fit(), train.Result.from_path(first.path)):
        assert (
            repr(result.return_value) == "{'rank': 0, 'weights': array([0, 0]), 'pair': (0, 'a')}"
        )
        assert [each["rank"] for each in result.return_values] == [*range(max(1, num_workers))]


def test_nothing_is_returned_by_default(boosted: train.Result) -> None:
    for result in (boosted, train.Result.from_path(boosted.path)):
        assert (result.return_value, result.return_values) == (None, ())


class Model:
    """What only a pickle can hold."""


def test_a_returned_object_is_unpickled_only_on_request(tmp_path: Path) -> None:
    trainer = train.DataParallelTrainer(
        Model,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="run", storage_path=tmp_path, progress=False),
    )
    first = trainer.fit()
    assert isinstance(first.return_value, Model)
    for result in (trainer.fit(), train.Result.from_path(first.path)):
        with pytest.raises(train.ReturnValueError, match="allow_pickle=True"):
            _ = result.return_value
    trusted = train.Result.from_path(first.path, allow_pickle=True)
    assert isinstance(trusted.return_value, Model)


def returns_too_much() -> tuple[object, ...]:
    train.report({"loss": 1.0})
    if train.get_context().get_world_rank() == 0:
        return (bytes(17 << 20),)
    return (threading.Lock(),)


def test_a_value_that_can_not_be_kept_does_not_lose_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = train.DataParallelTrainer(
        returns_too_much,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    assert (result.metrics, result.finished) == ({"loss": 1.0}, True)
    for each in ("rank 0 has returned isn't kept: it takes more than", "rank 1 has returned isn't"):
        assert each in caplog.text
    with pytest.raises(train.ReturnValueError, match=r"more than 16\.0 MiB"):
        _ = result.return_value
    with pytest.raises(train.ReturnValueError, match=r"more than 16\.0 MiB"):
        _ = train.Result.from_path(result.path).return_value


def reports_losses() -> None:
    rank = train.get_context().get_world_rank()
    for step in range(3 - rank):
        train.report({"loss": 10 * step + rank})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_ranks_metrics_are_kept_on_request(tmp_path: Path, num_workers: int) -> None:
    def fit(keep: Literal["rank_0", "every_rank"]) -> train.Result:
        return train.DataParallelTrainer(
            reports_losses,
            scaling_config=train.ScalingConfig(num_workers=num_workers),
            run_config=train.RunConfig(
                name=keep, storage_path=tmp_path, progress=False, keep_reports=keep
            ),
        ).fit()

    def losses(result: train.Result) -> dict[int, list[int]]:
        return {rank: [m["loss"] for m in kept] for rank, kept in result.histories.items()}

    assert losses(fit("rank_0")) == {0: [0, 10, 20]}
    result = fit("every_rank")
    expected = {0: [0, 10, 20], 1: [1, 11]} if num_workers else {0: [0, 10, 20]}
    assert losses(result) == losses(train.Result.from_path(result.path)) == expected
    assert [m["loss"] for m in result.history] == expected[0]


def test_whose_reports_are_kept_is_checked() -> None:
    with pytest.raises(train.InvalidJobError, match=r"RunConfig\.keep_reports: 'all'"):
        train.DataParallelTrainer(
            reports_losses,
            run_config=train.RunConfig(keep_reports="all"),  # type: ignore[arg-type]  # the point
        )
