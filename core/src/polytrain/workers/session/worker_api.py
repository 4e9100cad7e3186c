"""The functions that a training function calls: `report`, `get_checkpoint` and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.config.validation_config import ValidationTaskConfig
from polytrain.errors import NotInWorkerError
from polytrain.events.notices import PreemptionInfo
from polytrain.linux.progress_page import beat
from polytrain.workers.session.checkpoint_files import (
    DEFAULT_HANDLING,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
    handling_of,
)
from polytrain.workers.session.context import Context
from polytrain.workers.session.session import WorkerSession
from polytrain.workers.session.survivor import Survivor

if TYPE_CHECKING:
    from polytrain.data.plan.cursor import Cursor
    from polytrain.data.plan.position import DataPosition
    from polytrain.data.plan.row_plan import Plan


_current: WorkerSession | None = None


@contextmanager
def current_session(session: WorkerSession) -> Iterator[None]:
    """Make a session the current one of this process's training function.

    That function may call `fit()` itself, for a run in this process.
    """
    global _current
    before, _current = _current, session
    try:
        yield
    finally:
        _current = before


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | None = None,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: bool | ValidationTaskConfig = False,
    *,
    upload: Literal["async", "sync"] | None = None,
) -> None:
    """Report metrics, and optionally a checkpoint, from inside a training function.

    Returns once there is a local snapshot of the checkpoint's files: links if possible, otherwise
    copies. The files are hashed, stored and committed in the background; the caller may delete its
    own at once. If a file is rewritten in place before it is stored, the checkpoint is void, with a
    warning; later reports copy that file.

    Args:
        metrics: names to numbers, strings, or lists and dicts of them. Arrays and tensors of one
            element count as numbers. `Result.metrics` and `Result.history` hold those of rank 0.
        checkpoint: `Checkpoint.from_directory(path)`, or files at any address. The files of all
            ranks that pass one are merged into one directory, unless `CheckpointConfig.written_by`
            says otherwise. If the state is the same on every rank, pass it on rank 0 only.
        checkpoint_dir_name: a name that only `checkpoint_upload_fn` gets; polytrain numbers
            directories.
        checkpoint_upload_mode: ASYNC and SYNC mean the same as for `upload`; with NO_UPLOAD the
            training function has stored the files itself, see `CheckpointUploadMode`.
        delete_local_checkpoint_after_upload: whether to delete the reported directory once its
            files are staged. By default only if the mode is given as ASYNC, as in Ray Train.
        checkpoint_upload_fn: called with the checkpoint and a name before this returns. It stores
            the files, preferably at the path that
            `get_context().get_storage().build_checkpoint_path_from_name(name)` returns, and returns
            the stored `Checkpoint`.
        validation: whether to validate the checkpoint with the trainer's `validation_config`, or
            a `ValidationTaskConfig`.
        upload: "sync" waits until the checkpoint is committed; by default
            `CheckpointConfig.upload`.

    Raises:
        TypeError: a metric has another type, or another argument isn't accepted.
        ValueError: an option is unknown or contradicts another; or a validation is requested
            without a checkpoint or `validation_config`, or with arguments that JSON can't hold.
        CheckpointError: the checkpoint's directory doesn't exist, or the disk has no room.
        NotInWorkerError: outside a training function, or in a child process of it.
    """
    handling = DEFAULT_HANDLING
    if not (
        upload is None
        and checkpoint_dir_name is None
        and checkpoint_upload_mode is None
        and delete_local_checkpoint_after_upload is None
        and checkpoint_upload_fn is None
    ):
        handling = handling_of(
            upload=upload,
            mode=checkpoint_upload_mode,
            deletes=delete_local_checkpoint_after_upload,
            upload_function=checkpoint_upload_fn,
            name=checkpoint_dir_name,
        )
    _session("report").report_from_function(metrics, checkpoint, handling, validation)


def heartbeat() -> None:
    """Show that training makes progress, for example in a long evaluation.

    Batches, reports and boosting rounds also count as progress. `FailureConfig.hang_timeout_s`
    limits the time without progress. A call takes less than a microsecond.

    Raises:
        NotInWorkerError: outside a training function.
    """
    _session("heartbeat")
    beat()


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to resume from, or the last one that this rank reported.

    After a report with a checkpoint, this waits for the commit.

    Returns:
        None if there is none: training starts from the beginning.

    Raises:
        CheckpointError: this rank's reported checkpoint isn't kept, because only rank 0's is.
        NotInWorkerError: outside a training function, or in a child process of it that would have
            to wait for a commit.
    """
    session = _session("get_checkpoint")
    session.survivor.reads_checkpoint += 1
    return session.newest_checkpoint()


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return the run's committed checkpoints, oldest first, including earlier attempts'.

    This waits until all checkpoints that this rank has reported are committed. Checkpoints that
    `CheckpointConfig` doesn't keep are left out.

    Args:
        consistency_mode: VALIDATED also waits until all requested validations have ended.
        timeout_s: maximum seconds to wait; None for no limit.

    Raises:
        TimeoutError: it took longer.
        ValueError: the mode is unknown.
        NotInWorkerError: outside a training function, or in a child process of it.
    """
    return _session("get_all_reported_checkpoints").all_checkpoints(consistency_mode, timeout_s)


def get_context() -> Context:
    """Return this process's place in the run.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return _session("get_context").context


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this rank's rows of a data set: a `polytrain_plugins.Shard`, or the backend's view.

    Args:
        dataset_name: its name in the trainer's `datasets`; "train" by default.

    Raises:
        KeyError: no data set of this name was passed to `make_trainer`.
        NotInWorkerError: outside a training function.
    """
    return _session("get_dataset_shard").shard("train" if dataset_name is None else dataset_name)


def checkpoint_requested() -> bool:
    """Return whether the run waits for a checkpoint, to stop or to resume with other workers.

    If so, the next `report` with a checkpoint is this process's last. A function that rarely makes
    checkpoints can call this after each step, and make one at once. If every rank writes a part,
    the ranks must first agree on a step: they may get different answers.

    Raises:
        NotInWorkerError: outside a training function, or in a child process of it.
    """
    return _session("checkpoint_requested").is_checkpoint_wanted()


def get_preemption_info() -> PreemptionInfo | None:
    """Return which nodes of this run are about to be taken away; None if none is, as far as known.

    The run asks for a checkpoint at the same time (`checkpoint_requested`), and goes on elsewhere
    once that is committed: a function need not call this. The ranks don't wait for each other here,
    and may get different answers at the same step.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return _session("get_preemption_info").preemption()


def gather_over_ranks(piece: bytes, *, call: str) -> list[bytes]:
    """Return every rank's bytes, by rank, for `polytrain.collective`. All ranks call this.

    Args:
        piece: this rank's bytes.
        call: name of the user's call, for errors.

    Raises:
        NotInWorkerError: outside a training function, or in a child process of it.
    """
    return _session(call.removesuffix("()")).gather_over_ranks(piece, call=call)


def open_cursor(plan: Plan, *, name: str | None = None) -> Cursor[DataPosition]:
    """Open a position in data that a training function brings, kept in checkpoints; for plugins.

    Args:
        plan: the order of the data.
        name: identifies the position in the next attempt; by default the number of the call.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return _session("open_cursor").cursor(plan, name)


def training_begins() -> None:
    """Note that the training takes the first step of the attempt; for plugins.

    Raises:
        NotInWorkerError: outside a training function.
    """
    _session("training_begins").training_begins()


def keep_all_batches(why: str) -> None:
    """Let a rollback leave no batch out: the loop couldn't tell where it is; for plugins.

    Args:
        why: the reason, for the error that then ends the run.

    Raises:
        NotInWorkerError: outside a training function.
    """
    _session("keep_all_batches").keep_all_batches(why)


def compare_replicas(by_rank: Sequence[bytes], what: str) -> None:
    """Compare what all ranks should hold alike, for plugins. All ranks call this.

    Args:
        by_rank: each rank's digest.
        what: what differs if the digests do, for people.

    Raises:
        ReplicasDifferError: the digests differ, and `RunConfig.digests` is set; otherwise rank 0
            logs a warning, once an attempt.
        NotInWorkerError: outside a training function.
    """
    _session("compare_replicas").compare_replicas(by_rank, what)


def record_exactness(why_not: str) -> None:
    """Record whether virtual workers give the same bits at any number of workers; for plugins.

    Args:
        why_not: why they may not, as a clause; empty if a check has passed.

    Raises:
        NotInWorkerError: outside a training function.
        TypeError: it isn't text, which the run's journal needs.
    """
    _session("record_exactness").record_exactness(why_not)


def starting_checkpoint() -> Path | None:
    """Return the directory of the attempt's starting checkpoint, for plugins.

    It doesn't change after a report, unlike `get_checkpoint`; None if the attempt started fresh.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return _session("starting_checkpoint").checkpoint


def survivor() -> Survivor:
    """Return what keeps this rank's state for the case that another rank is lost; for plugins.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return _session("survivor").survivor


def scratch_directory() -> Path:
    """Return a directory on the node's disk for this rank's attempt only, for plugins.

    It is removed when the next attempt requests its own, or when the run ends.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return _session("scratch_directory").scratch


def _session(function: str) -> WorkerSession:
    if _current is None:
        raise NotInWorkerError(
            f"{function}() works only inside a training function that Trainer.fit() runs."
        )
    return _current


class Calls:
    """Counts the calls of one function in each attempt."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._context: Context | None = None
        self._count = 0

    def next(self) -> int:
        """Count a call, and return its number, from 1."""
        self._count = self.upcoming()
        self._context = get_context()
        return self._count

    def upcoming(self) -> int:
        """The number of the next call."""
        # In an inline run, several attempts share a process.
        return self._count + 1 if self._context is get_context() else 1

    def resumes(self, call: int, *, made_by: int) -> bool:
        """Return whether a call resumes from a checkpoint. A later call starts fresh.

        Args:
            call: number of the call.
            made_by: number of the call that saved the checkpoint.

        Raises:
            ValueError: a later call saved the checkpoint.
        """
        if call < made_by:
            raise ValueError(
                f"This is {self._function} number {call} of the training function, and number "
                f"{made_by} saved the newest checkpoint: the result of number {call} isn't in it. "
                "Give each call its own run, and pass the model on with restore_from."
            )
        return call == made_by
