"""What user code and engines call while they train: `report`, `get_checkpoint` and so on."""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.scratch import directory_of_attempt
from polytrain.checkpoint.snapshot import Snapshots, Stamps, file_names
from polytrain.common.errors import CheckpointError, NotInTrainerError
from polytrain.monitoring.progress_page import beat
from polytrain.workers.checkpoint_uploader import CheckpointUploader, Write
from polytrain.workers.context import Context
from polytrain.workers.job import LaunchOrder, WorkerJob
from polytrain.workers.messages import (
    Channel,
    Message,
    ignored_message,
    report_message,
    saves_on_request_message,
)
from polytrain.workers.metrics import plain_metrics
from polytrain_plugins import CheckpointKind, Engine, World

if TYPE_CHECKING:
    from polytrain.data.plan.cursor import Cursor
    from polytrain.data.plan.position import DataPosition
    from polytrain.data.plan.row_plan import Plan
    from polytrain.data.shards.batched import BatchedShard

logger = logging.getLogger(__name__)


class TrainerSession:
    """One worker process's side of the run, from joining the collective to the end of training.

    It is the `Session` that `Engine.train` gets, and what the functions of this module act on.
    """

    def __init__(
        self,
        *,
        job: WorkerJob,
        order: LaunchOrder,
        world: World,
        engine: Engine[Any],
        shards: Mapping[str, BatchedShard],
        channel: Channel,
        scratch: Path,
    ) -> None:
        """
        Args:
            job: what is trained.
            order: in which attempt; its starting point is a directory of this node.
            world: as it was joined.
            engine: that joined it.
            shards: this rank's.
            channel: to its agent.
            scratch: directory on the node for files on their way to the storage.
        """
        self.world = world
        self.checkpoint = Path(order.start.path) if order.start.path else None
        self.context = Context(
            run_name=job.run_name, world=world, checkpoint_kind=job.checkpoint_kind
        )
        self._job = job
        self._engine = engine
        self._shards = shards
        self._cursors: dict[str, Cursor[Any]] = {
            name: shard.cursor for name, shard in shards.items()
        }
        self._positions = order.start.positions
        self._unnamed = 0
        self._channel = channel
        self._scratch = scratch
        self._uploader = CheckpointUploader(
            job=job, order=order, rank=world.me.rank, channel=channel, scratch=scratch
        )
        self._snapshots = Snapshots()
        self._step = order.start.step
        self._saved_step = order.start.step if order.start.own else None
        self._last_metrics: Mapping[str, Any] = {}
        self._reported_ignored = False
        self._saves_on_request = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def scratch(self) -> Path:
        """A directory for this attempt alone; see `polytrain_plugins.Session`."""
        me, attempt = self.world.me, self.world.attempt
        return directory_of_attempt(self._scratch, rank=me.rank, attempt=attempt)

    def report(self, *, step: int, metrics: Mapping[str, Any], model: Any = None) -> None:
        """Report a step of declarative training; see `polytrain_plugins.Session`."""
        beat()
        with self._lock:
            self._step, self._last_metrics = step, plain_metrics(metrics)
            if self._writes and model is not None and self._is_due(step):
                self._save(model, with_it=self._reported)
            else:
                self._channel.send(*self._reported())

    def finish(self, model: Any) -> None:
        """Save the model that declarative training ended in, unless that is done already."""
        with self._lock:
            if self._writes and self._saved_step != self._step:
                self._save(model, with_it=list)

    def report_from_function(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        upload: Literal["async", "sync"] | None,
    ) -> None:
        """Report from a training function; see `report` below."""
        beat()
        if os.getpid() != self._pid:
            raise NotInTrainerError(
                "report() was called in a child process, such as a data loader's worker. "
                "Call it in the training function's own process."
            )
        plain = plain_metrics(metrics)
        if upload not in (None, "async", "sync"):
            raise ValueError(f"upload={upload!r} is unknown: pass 'async' or 'sync'.")
        source = _directory_of(checkpoint)
        with self._lock:
            self._step, self._last_metrics = self._step + 1, plain
            if source is not None and self._writes:
                waits = self._job.waits_for_commit if upload is None else upload == "sync"
                self._give(
                    lambda to: self._snapshots.take(source, to),
                    source=source,
                    with_it=self._reported,
                    waits=waits,
                )
                return
            if source is None:
                self._channel.send(*self._reported())
                return
            ignored = ignored_message(self._step, file_names(source))
            self._channel.send(*self._reported(), ignored)
            if not self._reported_ignored:
                self._reported_ignored = True
                logger.warning(
                    "The checkpoint that rank %d reports is not kept: the state of %s is the same "
                    "on every rank, so rank 0's is the run's.",
                    self.world.me.rank,
                    self._job.backend.name,
                )

    def newest_checkpoint(self) -> Checkpoint | None:
        """The one that this rank has reported last, or that the attempt began with."""
        with self._lock:
            if self._reported_ignored:
                raise CheckpointError(
                    f"get_checkpoint() can't return what rank {self.world.me.rank} has reported: "
                    "it isn't kept, because rank 0's checkpoint is the run's. Ask before the first "
                    "report, or ask on rank 0 and broadcast."
                )
            directory = self._uploader.newest()
        if directory is not None:
            location = self._job.checkpoints.below(directory)
            return Checkpoint(location.address, location.filesystem)
        return Checkpoint(str(self.checkpoint)) if self.checkpoint else None

    def shard(self, name: str) -> Any:
        """The shard of this rank, as the engine presents it."""
        if name not in self._shards:
            known = ", ".join(map(repr, self._shards)) or "none were passed to make_trainer"
            nearest = difflib.get_close_matches(name, self._shards, n=1)
            meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise KeyError(f"No data set is named {name!r}. There are: {known}.{meant}")
        return self._engine.adapt(self._shards[name])

    def cursor(self, plan: Plan, name: str | None) -> Cursor[DataPosition]:
        """A position of its own for data that the training function brings along itself."""
        from polytrain.data.plan.cursor import Cursor
        from polytrain.data.shards.opening import in_plan

        if name is None:
            # Its number: a training function makes the same calls every time.
            name = f"data loader {self._unnamed}"
            # Those that one seed has been found for are to differ all the same.
            plan = replace(plan, seed=plan.seed + self._unnamed)
            self._unnamed += 1
        position = self._positions.get(name)
        earlier = self._cursors.get(name)
        if earlier is not None:
            # Another loader in its place goes on with the epochs.
            next_epoch = earlier.next_epoch()
            position = earlier.position.moved(next_epoch.number, next_epoch.start).to_plain()
        if position is not None:
            # Its seed is whatever the process's random numbers began with: the first one counts.
            plan = replace(plan, seed=position["plan"]["seed"])
        self._cursors[name] = cursor = Cursor(in_plan(name, position, plan))
        return cursor

    def is_checkpoint_wanted(self) -> bool:
        """Whether the run waits for a checkpoint; see `checkpoint_requested` below."""
        with self._lock:
            if not self._saves_on_request:
                self._saves_on_request = True
                self._channel.send(saves_on_request_message())
            return self._uploader.is_asked_to_stop()

    def _is_due(self, step: int) -> bool:
        """Whether declarative training makes a checkpoint of this step."""
        every = self._job.checkpoint_frequency
        if every > 0 and step % every == 0:
            return True
        # Where every rank writes a part, they only agree on the steps that were agreed before.
        agreed = self._job.checkpoint_kind is CheckpointKind.EVERY_RANK
        return not agreed and self._uploader.is_asked_to_stop()

    @property
    def stalled_s(self) -> float:
        """Seconds that training has stood still for checkpoints, so far."""
        return self._uploader.stalled_s

    def _reported(self) -> list[Message]:
        return [report_message(self._step, self._last_metrics, self.stalled_s)]

    @property
    def _writes(self) -> bool:
        return self._job.writes_checkpoints(self.world.me.rank)

    def _save(self, model: Any, *, with_it: Callable[[], list[Message]]) -> None:
        def save(directory: Path) -> Stamps:
            self._engine.save(model, directory)
            return {}

        self._give(save, with_it=with_it, waits=self._job.waits_for_commit)
        self._saved_step = self._step

    def _give(
        self,
        write: Write,
        *,
        source: Path | None = None,
        with_it: Callable[[], list[Message]],
        waits: bool,
    ) -> None:
        positions = {
            name: cursor.position.to_plain()
            for name, cursor in self._cursors.items()
            if not cursor.position.is_beginning
        }
        is_last = self._uploader.is_asked_to_stop()
        self._uploader.give(
            write,
            source=source,
            step=self._step,
            metrics=self._last_metrics,
            positions=positions,
            with_it=with_it,
            waits=waits or is_last,
        )
        if is_last:
            self._uploader.stop()


def _directory_of(checkpoint: Any) -> Path | None:
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, Checkpoint):
        kind = type(checkpoint)
        raise TypeError(
            f"report takes a polytrain.Checkpoint, not {kind.__module__}.{kind.__qualname__}. "
            "Pass polytrain.Checkpoint.from_directory(path)."
        )
    directory = Path(checkpoint.path)
    if not directory.is_dir():
        raise CheckpointError(
            f"There is no directory {checkpoint.path!r} to make a checkpoint of. "
            "Report it before it is deleted."
        )
    return directory


_current: TrainerSession | None = None


@contextmanager
def current_session(session: TrainerSession) -> Iterator[None]:
    """Make a session the one that this process's training function talks to."""
    global _current
    _current = session
    try:
        yield
    finally:
        _current = None


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    *,
    upload: Literal["async", "sync"] | None = None,
) -> None:
    """Report metrics, and optionally a checkpoint, from inside a training function.

    Returns as soon as there is a local snapshot of the checkpoint's files: links where that is
    possible, else copies. They are hashed, stored and committed in the background; the caller may
    delete its own at once. Files that are written to again in place before they are stored make
    the checkpoint void, with a warning; from then on they are copied.

    Args:
        metrics: names to numbers, strings, or lists and dicts of them. Arrays and tensors of one
            element count as numbers. Rank 0's go to `Result.metrics` and `Result.history`.
        checkpoint: `Checkpoint.from_directory(path)`. Where the state is the same on every rank
            only rank 0's is kept; pass it from there.
        upload: "sync" waits until the checkpoint is committed; `CheckpointConfig.upload` by
            default.

    Raises:
        TypeError: if a metric is none of these.
        ValueError: if `upload` is neither.
        CheckpointError: if the checkpoint's directory isn't there, or there is no room for it.
        NotInTrainerError: outside a training function, or in a child process of it.
    """
    _session("report").report_from_function(metrics, checkpoint, upload)


def heartbeat() -> None:
    """Show that the training goes on, where nothing else does: in a long evaluation, say.

    Batches, reports and boosting rounds count by themselves. See `FailureConfig.hang_timeout_s` for
    what becomes of a worker that shows nothing. Costs less than a microsecond.

    Raises:
        NotInTrainerError: outside a training function.
    """
    _session("heartbeat")
    beat()


def get_checkpoint() -> Checkpoint | None:
    """The newest checkpoint: to resume from, or the one that this rank has reported last.

    After a report with a checkpoint it waits until that is committed.

    Returns:
        None if there is none: training starts from the beginning.

    Raises:
        CheckpointError: this rank has reported one that isn't kept, since only rank 0's is.
        NotInTrainerError: outside a training function.
    """
    return _session("get_checkpoint").newest_checkpoint()


def get_context() -> Context:
    """This process's place in the run.

    Raises:
        NotInTrainerError: outside a training function.
    """
    return _session("get_context").context


def get_dataset_shard(name: str = "train") -> Any:
    """This rank's rows of a data set: a `polytrain_plugins.Shard`, or what the backend makes of it.

    Raises:
        KeyError: if no data set of this name was passed to `make_trainer`.
        NotInTrainerError: outside a training function.
    """
    return _session("get_dataset_shard").shard(name)


def checkpoint_requested() -> bool:
    """Whether the run waits for a checkpoint, to stop or to go on with other workers.

    The next `report` with a checkpoint, whenever it comes, is the last of this process then. Who
    makes checkpoints rarely may ask after each step, and make one at once. Where every rank writes
    a part, ranks may be told at different steps: they have to agree first.

    Raises:
        NotInTrainerError: outside a training function.
    """
    return _session("checkpoint_requested").is_checkpoint_wanted()


def open_cursor(plan: Plan, *, name: str | None = None) -> Cursor[DataPosition]:
    """For plugins: a position in data that a training function brings along, kept in checkpoints.

    Args:
        plan: the order of the data.
        name: which position it is, for the next attempt; by default the number of the call.

    Raises:
        NotInTrainerError: outside a training function.
    """
    return _session("open_cursor").cursor(plan, name)


def scratch_directory() -> Path:
    """For plugins: a directory on the node's disk for this rank's attempt alone.

    It is removed when the next attempt asks for its own, or the run ends, however that comes about.

    Raises:
        NotInTrainerError: outside a training function.
    """
    return _session("scratch_directory").scratch


def _session(function: str) -> TrainerSession:
    if _current is None:
        raise NotInTrainerError(
            f"{function}() works only inside a training function that Trainer.fit() runs."
        )
    return _current
