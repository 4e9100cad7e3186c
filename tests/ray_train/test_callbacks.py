"""`RunConfig(callbacks=…)`, with Ray Train's signatures, in real runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

import polytrain as train


class Notes(train.UserCallback):
    """As in Ray Train's guide to callbacks."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.exceptions: list[Any] = []
        self.names: set[str | None] = set()

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: train.Checkpoint | None
    ) -> None:
        self.names.add(run_context.get_run_config().name)
        text = checkpoint and Path(checkpoint.path, "model").read_text()
        self.reports.append(([each["loss"] for each in metrics], text))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.exceptions.append({rank: str(error) for rank, error in worker_exceptions.items()})


def reports() -> None:
    context = train.get_context()
    started = train.get_checkpoint()
    first = 1 if started is None else int(Path(started.path, "model").read_text()) + 1
    for step in range(first, 5):
        rank = context.get_world_rank()
        checkpoint = None
        if step % 2 == 0 and rank == 0:
            directory = tempfile.mkdtemp()
            Path(directory, "model").write_text(str(step))
            checkpoint = train.Checkpoint(directory)
        train.report({"loss": 10 * step + rank}, checkpoint)
        if checkpoint is not None:
            train.get_checkpoint()
        train.collective.barrier()
        if context.get_attempt() == 0 and step == 2 and rank == 1:
            raise ValueError("once")


@pytest.mark.parametrize(
    ("workers", "config"), [(1, None), (2, None), (2, train.torch.TorchConfig())]
)
def test_callbacks_get_all_ranks_reports(tmp_path: Path, workers: int, config: Any) -> None:
    notes = Notes()
    train.DataParallelTrainer(
        reports,
        backend_config=config,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name="run",
            storage_path=tmp_path,
            progress=False,
            callbacks=[notes],
            failure_config=train.FailureConfig(max_failures=1),
        ),
    ).fit()
    # The second attempt resumes at the checkpoint, so each step is reported once.
    assert notes.reports == [
        ([10 * step + rank for rank in range(workers)], str(step) if step % 2 == 0 else None)
        for step in range(1, 5)
    ]
    assert [each[1] for each in notes.exceptions] == ["once"] * (workers - 1)
    assert notes.names == {"run"}


def test_callbacks_of_an_inline_run(tmp_path: Path) -> None:
    notes = Notes()
    train.DataParallelTrainer(
        reports,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(
            name="run", storage_path=tmp_path, progress=False, callbacks=[notes]
        ),
    ).fit()
    assert [text for _, text in notes.reports] == [None, "2", None, "4"]


def test_what_is_no_callback_is_refused_before_the_run() -> None:
    with pytest.raises(train.InvalidJobError, match=r"RunConfig.callbacks\[0\]: .*the class Notes"):
        train.DataParallelTrainer(reports, run_config=train.RunConfig(callbacks=[Notes]))
