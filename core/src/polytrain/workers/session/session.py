"""The session of a worker process, which `report` and the other functions use."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.scratch import directory_of_attempt
from polytrain.checkpoint.staging import Snapshots, Stagings, Stamps
from polytrain.config.validation_config import ValidationTaskConfig, validation_of_report
from polytrain.errors import CheckpointError, NotInWorkerError
from polytrain.events.notices import PreemptionInfo
from polytrain.functions.return_values import Returned
from polytrain.linux.clock import Clock
from polytrain.linux.progress_page import beat
from polytrain.policy.copies import CopyPace
from polytrain.policy.divergence import DivergenceWatch, divergence_rule
from polytrain.policy.stop_rule import stop_rule
from polytrain.text.described import is_whole, numbered
from polytrain.text.metrics import plain_metrics
from polytrain.workers.processes.channel import Channel, Message
from polytrain.workers.session.checkpoint_files import (
    STATUS_BY_VALIDATION,
    CheckpointConsistencyMode,
    CheckpointFiles,
    CheckpointHandling,
    ReportedCheckpoint,
    directory_to_delete,
    expect_checkpoint,
    expect_stored,
    files_of,
)
from polytrain.workers.session.checkpoint_uploader import CheckpointUploader
from polytrain.workers.session.context import Context, RunStorage
from polytrain.workers.session.copies import Copies
from polytrain.workers.session.data_cursors import DataCursors
from polytrain.workers.session.job import LaunchOrder, WorkerJob
from polytrain.workers.session.messages import (
    condition_met_message,
    digested_message,
    diverged_message,
    done_message,
    exactness_message,
    report_message,
    saves_on_request_message,
)
from polytrain.workers.session.replicas import Replicas
from polytrain.workers.session.survivor import Place, Survivor
from polytrain_plugins import CheckpointKind, Engine, Report, World
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.returned import digests_of, expect_model, expect_saved, gathered, name_of

if TYPE_CHECKING:
    from polytrain.data.plan.cursor import Cursor
    from polytrain.data.plan.position import DataPosition
    from polytrain.data.plan.row_plan import Plan
    from polytrain.data.shards.shard import BatchedShard

logger = logging.getLogger(__name__)

MAX_DIGESTS = 10_000
"""Tensors of one state with digests: each takes 16 bytes in the journal each time."""

_READ_BEFORE = (
    "%r was read before the training, and is trained on now. After a restart within an epoch, the "
    "first loop over it gets the rest of that epoch, whatever the loop is for. For a pass before "
    'the training, pass the data once more under another name (datasets={"train": data, "again": '
    "data}), or read it by a loader that isn't prepared."
)

_STATE_UNKNOWN = (
    "nothing says what that is. Use torch's TrainingState with batches of prepare_data_loader or "
    "get_dataset_shard, Keras from options or with ReportCallback and a shard's batches, or "
    "XGBoost or LightGBM from options; or leave `memory` out"
)


class WorkerSession:
    """Handles a worker process's reports and requests, from the join to the end of training.

    `Engine.train` gets it as its `Session`, and the functions of `worker_api` use it.
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
            order: the order of the attempt; its starting point is a directory on this node.
        """
        self.world = world
        self.checkpoint = Path(order.start.path) if order.start.path else None
        self._job = job
        self._engine = engine
        self._shards = shards
        self._cursors = DataCursors(
            shards, saved=order.start.positions, skipped=order.start.skipped
        )
        self._channel = channel
        self._scratch = scratch
        self._uploader = CheckpointUploader(
            job=job, order=order, rank=world.me.rank, channel=channel, scratch=scratch
        )
        self._snapshots = Snapshots()
        self.survivor = Survivor(
            channel=channel,
            attempt=order.attempt_id,
            rank=world.me.rank,
            stagings=Stagings(scratch=scratch, near=job.near_staging),
            place=self._place,
        )
        """Keeps the state of the training, if its backend can."""

        self.survivor.copies = self._copies(order)

        self._clock = Clock()
        self.context = Context(
            run_name=job.checkpoints.parent.name,
            world=world,
            checkpoint_kind=job.spec.checkpoint_kind,
            storage=RunStorage(
                location=job.checkpoints.parent,
                next_directory=lambda: job.checkpoints.below(self._uploader.next_directory),
            ),
        )
        self._step = self._first_step = order.start.step
        self.survivor.reported(self._step, {})
        self._saved_step = order.start.step if order.start.own else None
        self._last_step = self._saved_step or 0
        """Declarative training: the last step of this run that is known to be done."""

        self._last_metrics: Mapping[str, Any] = {}
        conditions = stop_rule(job.spec.run_config)
        self._stop_rule = conditions if world.me.rank == 0 and conditions.reads_reports else None
        """The conditions that this rank checks; None once one is met."""

        rule = divergence_rule(job.spec.run_config.failure_config)
        self._divergence: DivergenceWatch | None = None
        """Looks at each report; None if nothing counts as divergence."""

        self._warns_of_divergence = world.me.rank == 0 and not order.is_repeat
        if rule is not None:
            self._divergence = DivergenceWatch(
                rule,
                rank=world.me.rank,
                step=order.start.step,
                places=self._cursors.places(),
                before=order.last_reports,
                skips=job.skips_bad_batches,
                starts_unseen=order.start.is_rescue,
                skipped=order.start.skipped,
            )

        self._model: Any = None
        """The model of the last report of declarative training."""

        self._is_ending = False
        """Whether a report has met a condition."""

        self._saves = job.spec.saves_by_itself or order.start.own
        """Whether the training is known to make checkpoints: a stop waits for the next one."""

        self._has_ignored_report = False
        """Whether this rank has reported a checkpoint of which nothing is kept."""

        self._saves_on_request = False
        self._replicas = Replicas(
            rank=world.me.rank, raises=job.spec.run_config.digests is not None
        )
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def scratch(self) -> Path:
        """A directory for this attempt only; see `polytrain_plugins.Session`."""
        me, attempt = self.world.me, self.world.attempt
        return directory_of_attempt(self._scratch, rank=me.rank, attempt=attempt)

    def report(self, *, step: int, metrics: Mapping[str, Any], model: Any = None) -> None:
        """Report a step of declarative training; see `polytrain_plugins.Session`."""
        beat()
        with self._lock:
            self._model = model
            self._take_metrics(self._next_step(step), plain_metrics(metrics))
            met = self._condition_met()
            if self._writes and model is not None and self._is_due(step):
                self._save(model, report=partial(self._reported, met, has_checkpoint=True))
            else:
                self._send_report(met)

    def _next_step(self, step: Any) -> int:
        """Return a step of declarative training.

        Raises:
            TypeError: it isn't a whole number.
            ValueError: it isn't after the last one.
        """
        if is_whole(step) and step > self._last_step:
            self._last_step = int(step)
            return self._last_step
        call = f"{name_of(self._engine, 'train')} calls report(step={step!r})"
        if not is_whole(step):
            raise TypeError(f"{call}, which is no whole number. Give the number of steps done.")
        raise ValueError(
            f"{call} after {numbered(self._last_step, 'step')}. Count steps over the whole "
            "run, from 1: one that resumes from session.checkpoint continues with the step "
            "after that checkpoint's."
        )

    def finish(self, model: Any) -> None:
        """Save the final model of declarative training, unless it is saved already.

        Raises:
            TypeError: there is none.
        """
        with self._lock:
            if self._writes and self._saved_step != self._step:
                expect_model(self._engine, model)
                self._save(model, report=lambda: [])

    def report_from_function(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        handling: CheckpointHandling,
        validation: bool | ValidationTaskConfig = False,
    ) -> None:
        """Report from a training function; see `worker_api.report`."""
        beat()
        self._expect_own_process("report()")
        plain = plain_metrics(metrics)
        repeats = self._job.spec.repeats is not None
        wanted = validation_of_report(
            validation,
            has_checkpoint=checkpoint is not None,
            validates=self._job.validates or repeats,
        )
        if repeats:
            # The run itself has validated it.
            wanted = None
        if checkpoint is None:
            with self._lock:
                self._take_metrics(self._step + 1, plain)
                self._send_report(self._condition_met())
            return
        expect_checkpoint(checkpoint)
        to_delete = (
            directory_to_delete(checkpoint, self.context.storage) if handling.deletes else None
        )
        if self._writes and handling.upload_function is not None:
            name = handling.name or self._uploader.next_directory
            stored = handling.upload_function(checkpoint, name)
            checkpoint = expect_stored(stored)
        self._report_checkpoint(plain, checkpoint, handling, wanted, to_delete)

    def _report_checkpoint(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint,
        handling: CheckpointHandling,
        validation: Mapping[str, Any] | None,
        to_delete: Path | None,
    ) -> None:
        def delete() -> None:
            if to_delete is not None:
                shutil.rmtree(to_delete, ignore_errors=True)

        files = files_of(checkpoint, self.context.storage, self._snapshots)
        upload = handling.upload
        waits = self._job.waits_for_commit if upload is None else upload == "sync"
        with self._lock:
            self._take_metrics(self._step + 1, metrics)
            if not self._writes:
                self._send_report(())
                self._has_ignored_report = True
                delete()
                return
            met = self._condition_met()

            def reported() -> list[Message]:
                # Now its files are staged under other names. The last report doesn't return.
                delete()
                return self._reported(met, has_checkpoint=True)

            self._submit(files, validation=validation, report=reported, waits=waits)

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return this rank's last checkpoint, or the one that the attempt started from."""
        if self._uploader.are_in_flight:
            # A child would take the answers for which its parent waits.
            self._expect_own_process("get_checkpoint()")
        with self._lock:
            if self._has_ignored_report:
                raise CheckpointError(
                    f"get_checkpoint() can't return what rank {self.world.me.rank} has reported: "
                    "it isn't kept, because of CheckpointConfig(written_by='rank_0'). Call it "
                    "before the first report, or call it on rank 0 and broadcast the result."
                )
            directory = self._uploader.newest()
        if directory is not None:
            location = self._job.checkpoints.below(directory)
            return Checkpoint(location.address, location.filesystem)
        return Checkpoint(str(self.checkpoint)) if self.checkpoint else None

    def all_checkpoints(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Return the run's checkpoints; see `worker_api.get_all_reported_checkpoints`."""
        self._expect_own_process("get_all_reported_checkpoints()")
        validated = CheckpointConsistencyMode(mode) is CheckpointConsistencyMode.VALIDATED
        with self._lock:
            found = self._uploader.all_of_run(validated=validated, timeout_s=timeout_s)
        filesystem = self._job.checkpoints.filesystem
        return [
            ReportedCheckpoint(
                checkpoint=Checkpoint(path, filesystem),
                metrics=metrics,
                status=STATUS_BY_VALIDATION[status],
            )
            for path, metrics, status in found
        ]

    def shard(self, name: str) -> Any:
        """Return this rank's shard, as the engine adapts it."""
        if name not in self._shards:
            known = ", ".join(map(repr, self._shards))
            remedy = (
                f"{did_you_mean(name, self._shards)}There are: {known}."
                if known
                else f"The trainer has none: pass it datasets={{{name!r}: …}}."
            )
            raise KeyError(f"No data set is named {name!r}. {remedy}")
        return self._engine.adapt(self._shards[name])

    def gather_over_ranks(self, piece: bytes, *, call: str) -> list[bytes]:
        """Return every rank's bytes, by rank; see `Engine.gather_over_ranks`."""
        self._expect_own_process(call)
        if self.world.size == 1:
            return [piece]
        pieces = gathered(self._engine, piece, self.world, call=call)
        beat()
        return pieces

    def cursor(self, plan: Plan, name: str | None) -> Cursor[DataPosition]:
        """Open a position in data that the training function brings itself."""
        cursor = self._cursors.open(plan, name)
        if self._divergence is not None:
            for opened, place in self._cursors.places().items():
                self._divergence.opened(opened, place)
        return cursor

    def training_begins(self) -> None:
        """Note that the training takes its first step; see `worker_api.training_begins`."""
        for name in self._cursors.training_begins():
            if self.world.me.rank == 0:
                logger.warning(_READ_BEFORE, name)

    def keep_all_batches(self, why: str) -> None:
        """Let a rollback leave no batch out; see `worker_api.keep_all_batches`."""
        if self._divergence is not None:
            self._divergence.keeps_all = why

    def compare_replicas(self, by_rank: Sequence[bytes], what: str) -> None:
        """Compare what all ranks should hold alike; see `worker_api.compare_replicas`."""
        self._replicas.compare(by_rank, what, step=self._step + 1)

    def record_exactness(self, why_not: str) -> None:
        """Record a check of virtual workers; see `worker_api.record_exactness`."""
        if not isinstance(why_not, str):
            raise TypeError(f"record_exactness({why_not!r}): give text, empty for no reason")
        with self._lock:
            self._channel.send(exactness_message(why_not))

    def is_checkpoint_wanted(self) -> bool:
        """Return whether the run waits for a checkpoint; see `worker_api.checkpoint_requested`."""
        self._expect_own_process("checkpoint_requested()")
        with self._lock:
            if not self._saves_on_request:
                self._saves_on_request = self._saves = True
                self._channel.send(saves_on_request_message())
            return self._is_last()

    def preemption(self) -> PreemptionInfo | None:
        """Return the nodes that go away soon; see `worker_api.get_preemption_info`."""
        self._expect_own_process("get_preemption_info()")
        with self._lock:
            return self._uploader.preemption()

    def _expect_own_process(self, call: str) -> None:
        if os.getpid() != self._pid:
            raise NotInWorkerError(
                f"{call} was called in a child process, such as a data loader's worker. "
                "Call it in the training function's own process."
            )

    def _is_due(self, step: int) -> bool:
        """Return whether declarative training makes a checkpoint at this step."""
        every = self._job.spec.run_config.checkpoint_config.checkpoint_frequency
        if every > 0 and step % every == 0:
            return True
        # If every rank writes a part, only the configured steps are equal on all ranks.
        agreed = self._job.spec.checkpoint_kind is CheckpointKind.EVERY_RANK
        return not agreed and self._is_last()

    def _is_last(self) -> bool:
        """Return whether the next checkpoint is the last."""
        return self._is_ending or self._uploader.is_asked_to_stop()

    def _take_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of the next report. If they diverge, wait to be killed.

        No checkpoint is made of a report that diverges.

        Raises:
            ConnectionClosedError: the agent has closed the connection.
            Exception: any error of the user's function.
        """
        self._step, self._last_metrics = step, metrics
        self.survivor.reported(step, metrics)
        self._cursors.reported()
        copies = self.survivor.copies
        if copies is not None and not copies.is_used and step > self._first_step + 1:
            copies.refuse(_STATE_UNKNOWN)
        if self._divergence is None:
            return
        diverged = self._divergence.look(
            attempt=self.world.attempt, step=step, metrics=metrics, places=self._cursors.places()
        )
        if self._divergence.notice and self._warns_of_divergence:
            logger.warning(
                "If training diverges, the run ends, in spite of on_divergence='rollback': %s.",
                self._divergence.notice,
            )
        self._divergence.notice = ""
        if diverged is not None:
            self._channel.send(*self._reported(), diverged_message(*diverged))
            while True:
                self._channel.receive()

    def _copies(self, order: LaunchOrder) -> Copies | None:
        """Return what copies the state, if that is wanted."""
        every = self._job.spec.run_config.checkpoint_config.memory
        if every is None or not self.survivor.can_keep:
            return None
        return Copies(
            channel=self._channel,
            attempt=order.attempt_id,
            rank=self.world.me.rank,
            is_alone=self.world.size == 1,
            are_sent=self.world.me.node_count > 1,
            scratch=self._scratch,
            pace=CopyPace(every=every, is_shared=self.world.size > 1),
            copying=self._uploader.copying,
            dropped=self._dropped_copies,
        )

    def _dropped_copies(self) -> Sequence[tuple[int, bool]]:
        with self._lock:
            return self._uploader.dropped_copies()

    def _place(self) -> Place:
        return Place(
            step=self._step,
            metrics=self._last_metrics,
            positions=self._cursors.held(),
        )

    def _condition_met(self) -> tuple[Message, ...]:
        """Return the message that the last report meets a condition; empty if it doesn't.

        Raises:
            Exception: any error of the user's function.
        """
        if self._stop_rule is None:
            return ()
        stopped = self._stop_rule.met_by(
            Report(
                rank=self.world.me.rank,
                attempt=self.world.attempt,
                step=self._step,
                metrics=self._last_metrics,
                time=self._clock.now(),
            )
        )
        if stopped is None:
            return ()
        self._stop_rule, self._is_ending = None, True
        return (condition_met_message(stopped),)

    def _send_report(self, met: tuple[Message, ...]) -> None:
        """Send a report without a checkpoint; it is the last if nothing makes checkpoints."""
        self._channel.send(*self._reported(met))
        if met and not self._saves:
            self._uploader.stop()

    def done(self, returned: Returned | None) -> None:
        """Send that training has returned, with its return value."""
        waited = self._uploader.stalled_s, self._uploader.copied_s
        self._channel.send(done_message(*waited, returned))

    def _reported(
        self, met: tuple[Message, ...] = (), *, has_checkpoint: bool = False
    ) -> list[Message]:
        return [
            report_message(
                self._step,
                self._last_metrics,
                self._uploader.stalled_s,
                self._uploader.copied_s,
                has_checkpoint=has_checkpoint,
                at=self._clock.now(),
            ),
            *self._digested(),
            *met,
        ]

    def _digested(self) -> Iterator[Message]:
        """Yield the digests of rank 0's state, if they are due at this step."""
        every = self._job.spec.run_config.digests
        if every is None or self._step % every or self.world.me.rank != 0:
            return
        found = digests_of(self._engine, self._model)
        if found:
            yield digested_message(self._step, dict(islice(found.items(), MAX_DIGESTS)))

    @property
    def _writes(self) -> bool:
        return self._job.writes_checkpoints(self.world.me.rank)

    def _save(self, model: Any, *, report: Callable[[], list[Message]]) -> None:
        def save(directory: Path) -> Stamps:
            self._engine.save(model, directory)
            if self._job.spec.checkpoint_kind is CheckpointKind.ONE_RANK:
                expect_saved(self._engine, directory)
            return {}

        self._submit(
            CheckpointFiles(write=save),
            # The driver validates all of them.
            validation=None,
            report=report,
            waits=self._job.waits_for_commit,
        )
        self._saved_step = self._step

    def _submit(
        self,
        files: CheckpointFiles,
        *,
        validation: Mapping[str, Any] | None,
        report: Callable[[], list[Message]],
        waits: bool,
    ) -> None:
        is_last = self._is_last()
        self._saves = True
        self._uploader.submit(
            files,
            step=self._step,
            metrics=self._last_metrics,
            positions=self._cursors.recorded(),
            validation=validation,
            report=report,
            waits=waits or is_last,
        )
        if is_last:
            self._uploader.stop()
