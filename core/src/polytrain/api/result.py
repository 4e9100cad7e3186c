"""The result of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from polytrain import satellites
from polytrain.api.backend_checks import made_backend, raise_if_any
from polytrain.api.returns import Returns
from polytrain.api.shown import Row, as_html, as_text, line, place
from polytrain.checkpoint.checkpoint import Checkpoint, verify_here
from polytrain.checkpoint.manager import is_good, with_validations
from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.store import CheckpointStore, FoundCheckpoints
from polytrain.config.configs import CheckpointConfig
from polytrain.config.constraints import typed_problems
from polytrain.errors import CheckpointError, RunNotFoundError, TrainingFailedError
from polytrain.events.notices import Rollback
from polytrain.functions.users_code import user_frames_only
from polytrain.lazy_names import RayTrainClass, missing
from polytrain.output.metric_texts import metrics_text
from polytrain.policy.retention import best_first_key, ranked
from polytrain.record.history import JOURNAL, RunHistory, read_history
from polytrain.record.ledger import Ledger
from polytrain.record.near_runs import no_run_text
from polytrain.record.reports import Reports
from polytrain.run.fit import RunOutcome
from polytrain.run.identity import options_of
from polytrain.run.run import Run
from polytrain.storage.location import Location, expect_path
from polytrain.text.secret_names import without_credentials
from polytrain_plugins import (
    Backend,
    CheckpointInfo,
    Predictions,
    Stopped,
    load_backend,
)
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.returned import engine_of

if TYPE_CHECKING:
    from polytrain.api.trainer import Trainer
    from polytrain.prediction.predict import PredictionOutput
    from polytrain.record.repetition import Replay

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result(metaclass=RayTrainClass):
    """The outcome of `Trainer.fit`."""

    _theirs: ClassVar[str] = "Result"

    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last report of rank 0."""

    history: Sequence[Mapping[str, Any]] = ()
    """Every report of rank 0 that led to this result, in order, with what a validation of its
    checkpoint has returned. Steps that a restart repeated are here once. Millions of them take 8
    bytes for each number; `list(history)` takes far more."""

    histories: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Rank → its reports, as `history`: rank 0's alone, unless
    `RunConfig(keep_reports="every_rank")`. Ranks that a smaller number of workers doesn't have any
    more keep theirs."""

    checkpoint: Checkpoint | None = None
    """The newest committed checkpoint. If none was reported after the loss of a rank, this is the
    state that another rank had."""

    best_checkpoints: tuple[tuple[Checkpoint, Mapping[str, Any]], ...] = ()
    """The reported checkpoints that were kept, from best to worst, each with the metrics of its
    report and of its validation."""

    path: str
    """The run's directory or address: checkpoints, journal and logs."""

    restarts: int = 0
    """Attempts after the first, of all drivers that have worked on the run."""

    rollbacks: tuple[Rollback, ...] = ()
    """The attempts that `FailureConfig(on_divergence=…)` has ended, of all drivers, each with the
    step, the metric, and the batches that the run leaves out since."""

    ledger: Ledger = field(default_factory=Ledger)
    """Where the time went."""

    finished: bool = True
    """False if the run was stopped on request, or hasn't ended: `fit()` resumes it. A run that
    `RunConfig.stop` or `time_budget_s` has ended is finished."""

    stopped: Stopped | None = None
    """Who stopped the run before its training ended, and why; or which condition of `RunConfig`
    was met, at which step, by which value. None if its training ended."""

    error: TrainingFailedError | None = None
    """Why the run failed; None if it didn't."""

    validation_failure: str = ""
    """Why no checkpoint has a score, if the training has ended and each validation failed; else
    empty."""

    why_not_exact: tuple[str, ...] | None = None
    """Why the run may not be exact over world sizes, which `ScalingConfig(virtual_workers=…)`
    promises: what the checks of all its drivers have found, as clauses. Empty if it is exact. None
    for a run without virtual workers."""

    storage_filesystem: Any = None
    """`RunConfig.storage_filesystem` of the run."""

    backend: Backend | None = None
    returned: Returns = field(default_factory=Returns)
    """What training functions returned, encoded: read `return_value` instead."""

    def __getattr__(self, name: str) -> Any:
        raise missing("polytrain.Result", name)

    def __repr__(self) -> str:
        title, rows = self._shown()
        return as_text(f"Result of {title}", rows)

    def _repr_html_(self) -> str:
        return as_html(*self._shown())

    def _shown(self) -> tuple[str, list[Row]]:
        """The title and the lines of what a prompt or a notebook shows."""
        path = without_credentials(self.path)
        state = "finished" if self.finished else "stopped" if self.stopped else "not finished"
        checkpoint = "" if self.checkpoint is None else without_credentials(self.checkpoint.path)
        rows = [
            ("steps", str(_last_step(self.history))),
            ("metrics", metrics_text(self.metrics)),
            ("checkpoint", place(checkpoint)),
            ("restarts", str(self.restarts or "")),
            ("rollbacks", line("; ".join(map(str, self.rollbacks)))),
            ("not exact", line("; ".join(self.why_not_exact or ()))),
            ("stopped", line(str(self.stopped or ""))),
            ("error", line(str(self.error or self.validation_failure))),
            ("path", place(path)),
        ]
        name = line(PurePosixPath(path).name, 40)
        return f"{name}: {'failed' if self.error else state}", rows

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        storage_filesystem: Any = None,
        *,
        filesystem: Any = None,
        backend: Backend | str | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        allow_pickle: bool = False,
    ) -> Result:
        """Read the result of a run from its directory, whether or not the run has ended.

        This starts nothing, not even Ray, and runs no stored code.

        Args:
            path: `Result.path` of the run.
            storage_filesystem: as in `RunConfig`.
            filesystem: the same.
            backend: of the run, for `load_model`, or its name; by default made from the journal.
            checkpoint_config: how `best_checkpoints` are ranked; by default as the run's own.
            allow_pickle: whether `return_value` may read pickles, which can run code: only for a
                run whose directory you trust. Plain values and arrays aren't pickled.

        Raises:
            RunNotFoundError: there is no run.
            DamagedFileError: its journal holds what no run writes.
            OSError: the storage can't be read.
            RegistryError: no backend of this name can be loaded.
            ValueError: no file can have this path, or another argument is wrong.
        """
        backend = made_backend(backend)
        if checkpoint_config is not None:
            raise_if_any(typed_problems("checkpoint_config", checkpoint_config, CheckpointConfig))
        location = Location.of(path, storage_filesystem or filesystem, retry_s=0)
        try:
            run_history = read_history(location.open().read_log(JOURNAL))
        except NotADirectoryError:
            run_history = None
        if run_history is None:
            raise RunNotFoundError(no_run_text(location))
        warn_of_damage(location, run_history)
        return recorded(
            location,
            run_history,
            config=checkpoint_config,
            backend=backend,
            may_unpickle=allow_pickle,
        )

    @property
    def return_value(self) -> Any:
        """What rank 0's training function has returned.

        None if it returned nothing, or if the run isn't finished.

        Raises:
            ReturnValueError: it can't be pickled, takes more than 16 MiB, or can't be read here.
            OSError: the storage can't be read.
        """
        return self.returned.of_rank(0)

    @property
    def return_values(self) -> tuple[Any, ...]:
        """What the training function of each rank has returned; empty if none returned anything.

        Raises:
            ReturnValueError: as `return_value`; ranks above 0 share 256 MiB.
            OSError: the storage can't be read.
        """
        return self.returned.of_all()

    @property
    def metrics_dataframe(self) -> Any:
        """`history` as a `pandas.DataFrame`, with a row for each report."""
        import pandas as pd

        return pd.DataFrame(list(self.history))

    def get_best_checkpoint(self, metric: str, mode: Literal["max", "min"]) -> Checkpoint | None:
        """Return the kept checkpoint with the best value of a metric; None if none is kept.

        Args:
            metric: its name, `a/b` for a nested one.
            mode: "max" if greater is better, "min" if less is.

        Raises:
            ValueError: `mode` is another, or no kept checkpoint has a number of this name.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"mode: {mode!r} is unknown. Give 'max' or 'min'.")
        config = CheckpointConfig(checkpoint_score_attribute=metric, checkpoint_score_order=mode)
        ranks = [(best_first_key(metrics, config), each) for each, metrics in self.best_checkpoints]
        if not ranks:
            return None
        (has_none, _), best = min(ranks, key=lambda rank: rank[0])
        if has_none:
            known = sorted({name for _, metrics in self.best_checkpoints for name in metrics})
            raise ValueError(
                f"metric: no kept checkpoint has a number {metric!r}. "
                f"{did_you_mean(metric, known)}The reported metrics are: "
                f"{', '.join(known) or 'none'}."
            )
        return best

    def load_model(self, checkpoint: Checkpoint | Literal["best", "newest"] = "newest") -> Any:
        """The model of a checkpoint, as the framework's own object.

        A training function's checkpoint must hold the files that the backend's `Engine.save`
        writes; each backend's page says which.

        Args:
            checkpoint: "newest", "best" (the first of `best_checkpoints`), or a checkpoint, such
                as one of `get_best_checkpoint`.

        Raises:
            CheckpointError: if there is no checkpoint, or no backend to load it with.
            ValueError: `checkpoint` is something else.
        """
        backend, checkpoint = self._to_load(checkpoint)
        with checkpoint.as_directory() as directory:
            return engine_of(backend).load(Path(directory))

    @overload
    def predict(self, data: Any, *, output: None = None, **options: Any) -> Predictions: ...

    @overload
    def predict(self, data: Any, *, output: str | Path, **options: Any) -> PredictionOutput: ...

    @user_frames_only
    def predict(
        self,
        data: Any,
        *,
        checkpoint: Checkpoint | Literal["best", "newest"] = "newest",
        output: str | Path | None = None,
        keep: Sequence[str] = (),
        prediction_column: str = "prediction",
        num_workers: int | None = None,
        use_gpu: bool = False,
        batch_size: int | None = None,
        rows_per_file: int | None = None,
        transform: Callable[..., Mapping[str, Any]] | None = None,
        transformed: bool = False,
        **options: Any,
    ) -> Predictions | PredictionOutput:
        """Predict rows with the model of a checkpoint.

        Few rows are predicted in this process. Many rows are read and predicted by workers, on this
        machine or on a Ray cluster, as for `fit()`; a lost worker is replaced.

        With an output, rows and predictions stream through the workers into Parquet files, so there
        may be more of both than fit into memory. The same call after a kill predicts only what is
        missing. One process at a time writes to an output.

        Args:
            data: everything that a data set may be.
            checkpoint: as for `load_model`.
            output: a directory, or an address such as `s3://bucket/predictions`.
            keep: columns of the data to store beside the predictions.
            prediction_column: the name of the predictions' column. Models with several outputs have
                names of their own.
            num_workers: number of workers, with one CPU each; by default one for each free CPU.
                0 predicts in this process.
            use_gpu: whether each worker gets a GPU.
            batch_size: most rows that the model gets at once.
            rows_per_file: rows in a file, and in what is predicted again after a kill. By default
                100,000, and more from a hundred million rows on.
            transform: the function of `DataConfig(transform=…)`, if the model was trained with one.
                The checkpoint has its fingerprint, so that another one is an error.
            transformed: says that the rows are as that function returns them.
            options: the backend's own: see the page "Predict", or its page.

        Returns:
            Without an output an array whose first axis is the rows, in their order; or several
            such arrays by name, if the model has several outputs.

        Raises:
            CheckpointError: if there is no checkpoint, or no backend to load it with.
            InvalidJobError: (a ValueError) an argument is wrong, the data can't be read or lack
                columns, or the output has other predictions. Nothing was started.
            PredictionFailedError: workers were lost again and again.
            UnsupportedCapabilityError: the backend doesn't predict.
            ValueError: `checkpoint` is something else.
        """
        backend, chosen = self._to_load(checkpoint)
        return satellites.prediction.predict(
            satellites.prediction.PredictionRequest(
                backend=backend,
                checkpoint=chosen,
                data=data,
                output=output,
                keep=keep,
                prediction_column=prediction_column,
                num_workers=num_workers,
                use_gpu=use_gpu,
                batch_size=batch_size,
                rows_per_file=rows_per_file,
                transform=transform,
                transformed=transformed,
                options=options,
            )
        )

    def report(self, path: str | Path) -> Path:
        """Write the run as one HTML file, which opens from disk and needs no network.

        It has the timeline, where the time went, the curves of all metrics, failures with their
        stacks, the configuration and the checkpoints. It reads the run's storage, and also takes a
        run that hasn't ended. `polytrain report` does the same.

        Args:
            path: the file to write, or to replace.

        Returns:
            The path.

        Raises:
            RunNotFoundError: the run's directory was deleted.
            OSError: the storage can't be read, or the file can't be written.
            ValueError: no file can have this path.
        """
        expect_path(path)
        location = Location.of(self.path, self.storage_filesystem, retry_s=0)
        return satellites.page.write_page(location, Path(path).expanduser())

    @user_frames_only
    def replay(
        self,
        trainer: Trainer,
        *,
        from_step: int | None = None,
        steps: int | None = None,
        storage_path: str | Path | None = None,
        ignore: Sequence[str] = (),
    ) -> Replay:
        """Train a stretch of the run again, from one of its checkpoints, and compare the reports.

        It runs where it is called, with as many workers as the run had there, and writes nothing
        into the run. Metrics of rank 0 must be the same to the bit. What a resumed run doesn't
        repeat exactly, such as an order that a training function draws without a seed, differs.

        Args:
            trainer: a trainer with what the run was trained with. Its name, storage, conditions to
                stop, observers, trackers and validations don't count.
            from_step: start at the newest intact checkpoint up to this step; 0 starts where the
                run did. By default at the newest one after which there are reports, or else where
                the run did.
            steps: number of steps to compare, counted from `from_step`; by default all that
                follow.
            storage_path: directory or address for the replay's own files, which are deleted when
                it ends without an error; by default beside the run.
            ignore: metrics that may differ, such as times.

        Raises:
            CheckpointError: there is no intact checkpoint, or no report after it.
            InvalidJobError: the training function, its config, an option or a data set isn't the
                run's; it lists every difference. Nothing was started.
            RunNotFoundError: the run's directory was deleted.
            TrainingFailedError: the replay failed; its files are kept.
        """
        from polytrain.api.replay import replay

        return replay(
            Location.of(self.path, self.storage_filesystem),
            trainer,
            from_step=from_step,
            steps=steps,
            storage_path=storage_path,
            ignore=ignore,
        )

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of the run's storage.

        It takes `path` without its scheme: `bucket/runs/name` for `s3://bucket/runs/name`.

        Raises:
            OSError: the storage can't be reached.
        """
        return Location.of(self.path, self.storage_filesystem).on_filesystem()[0]

    def _to_load(
        self, wanted: Checkpoint | Literal["best", "newest"]
    ) -> tuple[Backend, Checkpoint]:
        checkpoint = self._chosen(wanted)
        if checkpoint is None:
            raise CheckpointError(
                f"The run in {self.path} has no checkpoint to load a model from. Report one: "
                "report(metrics, checkpoint=Checkpoint.from_directory(path))."
            )
        if self.backend is None:
            raise CheckpointError(
                f"The backend of {self.path} isn't installed here, or its journal doesn't hold all "
                "of its options. Install it, or pass it: Result.from_path(path, backend=…)."
            )
        if checkpoint != self.checkpoint:
            # The newest was verified when the run ended, or when this result was read.
            verify_here(checkpoint)
        return self.backend, checkpoint

    def _chosen(self, wanted: Checkpoint | Literal["best", "newest"]) -> Checkpoint | None:
        if isinstance(wanted, Checkpoint):
            return wanted
        if wanted == "newest":
            return self.checkpoint
        if wanted == "best":
            return self.best_checkpoints[0][0] if self.best_checkpoints else None
        raise ValueError(
            f"checkpoint: {wanted!r} is no checkpoint. Give 'newest', 'best' or a "
            "polytrain.Checkpoint, such as one of result.best_checkpoints."
        )


def result_of(run: Run, outcome: RunOutcome) -> Result:
    """The result of a run that has just ended."""

    def checkpoint(info: CheckpointInfo) -> Checkpoint:
        return Checkpoint(info.path, run.location.filesystem)

    stopped = outcome.conclusion.stopped
    result = replace(
        _of_record(outcome.record, run.location),
        checkpoint=checkpoint(outcome.newest) if outcome.newest else None,
        best_checkpoints=tuple((checkpoint(info), info.metrics) for info in outcome.best),
        finished=stopped is None or stopped.is_final,
        stopped=stopped,
        error=outcome.error,
        validation_failure=outcome.conclusion.validation_failure,
        returned=Returns(values=outcome.returned, may_unpickle=True),
        backend=run.spec.backend,
    )
    if outcome.error is not None:
        outcome.error.result = result
    return result


def _of_record(record: RunHistory, location: Location) -> Result:
    """What a run's record says by itself, as a result."""
    return Result(
        metrics=record.metrics,
        history=record.reports,
        histories={0: record.reports, **dict(sorted(record.of_other_ranks.items()))},
        path=location.address,
        restarts=record.ledger.restarts,
        rollbacks=record.divergences.rollbacks,
        ledger=record.ledger,
        finished=record.is_finished,
        stopped=record.stopped,
        validation_failure=record.validation_failure,
        why_not_exact=record.why_not_exact,
        storage_filesystem=location.filesystem,
    )


def warn_of_damage(location: Location, history: RunHistory) -> None:
    """Warn if a run's history lacks what can't be read of its journal."""
    if history.damage:
        logger.warning(
            "%s: %s. The history of the run lacks what was there; its checkpoints are as they are.",
            location.address,
            history.damage,
        )


def recorded(
    location: Location,
    run_history: RunHistory,
    *,
    config: CheckpointConfig | None,
    backend: Backend | None,
    may_unpickle: bool = False,
) -> Result:
    """The result of a run, from its journal.

    Args:
        config: how checkpoints are ranked; by default as the run's last driver ranked them.
        backend: the run's backend; by default made from the journal.
        may_unpickle: whether return values that are pickled may be read.

    Raises:
        OSError: the storage can't be read.
    """
    store = CheckpointStore(location=location)
    config = run_history.ranking if config is None else config
    found = store.find(since_token=run_history.since_token)
    good = tuple(each for each in found.manifests if is_good(each, run_history.divergences))
    found = replace(found, manifests=good)
    newest = newest_intact(store, found)
    reported = [each for each in found.manifests if not each.is_rescue]
    kept = ranked(with_validations(reported, run_history.validations), config)
    error = None
    if run_history.succeeded is False and not run_history.stopped:
        error = TrainingFailedError(run_history.reason, (), path=location.address)

    def checkpoint(manifest: Manifest) -> Checkpoint:
        return Checkpoint(store.location_of(manifest.directory).address, location.filesystem)

    return replace(
        _of_record(run_history, location),
        checkpoint=checkpoint(newest) if newest else None,
        best_checkpoints=tuple((checkpoint(each), each.metrics) for each in kept),
        error=error,
        returned=Returns(
            location=location if run_history.returned else None,
            file=run_history.returned or "",
            may_unpickle=may_unpickle,
        ),
        backend=backend or _backend(run_history.identity),
    )


def _last_step(history: Sequence[Mapping[str, Any]]) -> int:
    steps = history.steps() if isinstance(history, Reports) else range(1, len(history) + 1)
    return int(steps[-1]) if len(steps) else 0


def newest_intact(store: CheckpointStore, found: FoundCheckpoints) -> Manifest | None:
    """The newest checkpoint whose files are those that were committed; reads all of them.

    Warns of damaged ones.
    """
    newest, damaged = None, dict(found.damaged)
    for manifest in reversed(found.manifests):
        wrong = store.damage(manifest)
        if not wrong:
            newest = manifest
            break
        damaged[manifest.directory] = "; ".join(wrong)
    for directory, what in store.still_there(damaged).items():
        store.warn_of_damage(directory, what)
    return newest


def _backend(identity: Mapping[str, Any]) -> Backend | None:
    """The backend with the options that the journal holds; None if it can't be made here.

    Options that are functions or objects aren't in the journal, and loading a model and predicting
    need none of them.
    """
    try:
        return load_backend(identity["backend"])(**options_of(identity))
    except Exception:
        # It isn't installed on this machine, or it refuses to be made without an option.
        return None
