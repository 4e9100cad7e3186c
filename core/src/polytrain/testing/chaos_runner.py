"""One run of the chaos tier: runs a case, and checks the result."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
)
from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.errors import Failure
from polytrain.functions.pickling import code_of_job, pickled_with
from polytrain.record.entries import AttemptEnded, CheckpointCommitted
from polytrain.record.history import JOURNAL, entries
from polytrain.testing.chaos_cases import Case
from polytrain.testing.injection import FaultClock, FaultPlan, InjectedFault, WithFaults
from polytrain.testing.processes import leftovers
from polytrain.testing.rows import use_rows, wrong_rows
from polytrain.workers.available_clusters import ray_is_initialized
from polytrain_plugins import Backend, CheckpointKind

Work = Literal["model", "rows"]
"""What a run does: the backend's own training, or a function that records the used rows."""

BOUND_S = 60.0
"""Seconds within which every run must end."""

_JOB = "job"

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A backend and its training."""

    name: str
    backend: Backend
    training_function: Callable[..., Any] | None
    data: pa.Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """A run and its case."""

    subject: Subject
    case: Case
    work: Work
    directory: Path
    """The run's own directory."""

    @property
    def plan(self) -> FaultPlan:
        """The faults of the run."""
        return FaultPlan(directory=self.directory, faults=self.case.faults)

    @property
    def _may_lose_a_rank(self) -> bool:
        return any(fault.kind != "held" for fault in self.case.faults)

    def fit(self, clock: FaultClock) -> Result:
        """Train, in this process.

        Raises:
            TrainingFailedError: the run failed.
        """
        (self.directory / "diary").mkdir(parents=True, exist_ok=True)
        rows = self.work == "rows"
        backend, function = self.subject.backend, self.subject.training_function
        config: dict[str, Any] | None = {} if function is not None else None
        if rows:
            # With a training function, options for declarative training must be unset.
            backend, function = type(backend)(), use_rows
            every_rank = backend.capabilities.checkpoint is CheckpointKind.EVERY_RANK
            config = {"diary": str(self.directory / "diary"), "all_write": every_rank}
        declarative = function is None
        return Trainer(
            WithFaults(inner=backend, plan=self.plan),
            function,
            train_loop_config=config,
            datasets={"train": self.subject.data},
            scaling_config=ScalingConfig(
                num_workers=2,
                placement_strategy="SPREAD" if self.case.on_two_nodes else "PACK",
                cluster=self.case.cluster,
            ),
            run_config=RunConfig(
                name="run",
                storage_path=self.directory,
                failure_config=FailureConfig(
                    max_failures=self.case.max_failures,
                    # Where no rank dies there is nothing to detect soon, and a busy machine may
                    # take long for the first import of a framework.
                    rendezvous_timeout_s=BOUND_S / 3 if self._may_lose_a_rank else BOUND_S,
                    hang_timeout_s=self.case.hang_timeout_s,
                ),
                checkpoint_config=CheckpointConfig(checkpoint_frequency=1 if declarative else 0),
                observers=(clock,),
                progress=False,
                # A disk that is full stays full.
                storage_timeout_s=0,
            ),
        ).fit()


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """The result of a run."""

    run: ChaosRun
    wrong: list[str] = field(default_factory=list)
    note: str = ""
    """A remark on the run."""

    restarts: int = 0
    struck: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """Seconds from each fault to the first report of the attempt after it."""

    steps: int = 0
    model: Files = field(default_factory=dict)
    """The files of the newest checkpoint."""


def judged(run: ChaosRun, *, expected: Files | None, bound_s: float = BOUND_S) -> CaseResult:
    """Run a case, and check the result.

    Args:
        run: the run.
        expected: the expected model; None if any model is right.
        bound_s: seconds within which it must end.
    """
    outcome = CaseResult(run=run)
    run.directory.mkdir(parents=True, exist_ok=True)
    clock = run.plan.clock
    try:
        with bounded(bound_s):
            if run.case.effect == "other driver":
                _killed_driver(run)
            result = _ended(run, clock)
    except NotOverError as error:
        outcome.wrong.append(str(error))
        return outcome
    injected = run.plan.injected
    outcome.restarts, outcome.struck = result.restarts, len(injected)
    outcome.steps = len(result.history)
    outcome.recoveries_s = list(_recoveries(injected, clock.first_reports))
    outcome.wrong += _wrong_end(run, result)
    outcome.wrong += _wrong_reasons(run)
    outcome.wrong += _committed_twice(run)
    outcome.wrong += [f"never struck: {fault}" for fault in _missing(run.case, injected)]
    if run.case.effect == "maybe":
        outcome.note = _note(injected, result)
    if run.case.effect != "failure":
        outcome.model = _files(result)
        outcome.wrong += _wrong_model(run, result, outcome.model, expected)
    outcome.wrong += [f"left behind: {what}" for what in leftovers(Path(result.path))]
    return outcome


class NotOverError(Exception):
    """A run took too long."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise a NotOverError if the block takes longer. On the main thread only."""

    def expire(*_: object) -> None:
        raise NotOverError(f"it wasn't over after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ended(run: ChaosRun, clock: FaultClock) -> Result:
    try:
        return run.fit(clock)
    except TrainingFailedError as error:
        if error.result is None:
            raise
        return error.result


def _killed_driver(run: ChaosRun) -> None:
    """Run it in a separate process, which a fault kills."""
    address = None
    if ray_is_initialized():
        import ray

        address = ray.get_runtime_context().gcs_address
    write_job(run)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from polytrain.testing.chaos_runner import other_driver\n"
        f"other_driver({str(run.directory)!r}, {address!r})"
    )
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def write_job(run: ChaosRun) -> None:
    """Write a run where another process finds it."""
    written = code_of_job(run.subject.training_function, run.subject.backend)
    (run.directory / _JOB).write_bytes(pickled_with(*written, value=run))


def read_job(directory: str) -> ChaosRun:
    """The run that was written."""
    run: ChaosRun = pickle.loads(Path(directory, _JOB).read_bytes())
    return run


def other_driver(directory: str, address: str | None) -> None:
    """The main function of that process; `address` is that of its Ray, if it uses one."""
    if address is not None:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    run = read_job(directory)
    run.fit(run.plan.clock)


def _wrong_end(run: ChaosRun, result: Result) -> Iterator[str]:
    case, error = run.case, result.error
    if case.effect == "failure":
        kind = error.failures[0].kind if error is not None and error.failures else None
        if kind is not case.kind:
            yield f"it ended in {error!r}, of the kind {kind!r} instead of {case.kind!r}"
    elif error is not None:
        yield f"it failed: {error}"
    if result.restarts not in case.restarts:
        why = "; ".join(f"{each.kind.name}: {each}" for each in _failures(run).values())
        yield f"there were {result.restarts} restarts, instead of {case.restarts} ({why})"


def _failures(run: ChaosRun) -> dict[int, Failure]:
    """Attempt → why it ended early."""
    journal = entries([(run.directory / "run" / JOURNAL).read_bytes()])
    ends = (entry for entry in journal if isinstance(entry, AttemptEnded))
    return {entry.attempt: entry.failure for entry in ends if entry.failure is not None}


def _wrong_reasons(run: ChaosRun) -> Iterator[str]:
    failures = _failures(run)
    for attempt in sorted({fault.attempt for fault in run.plan.injected}):
        expected_ends = run.case.expected_ends(attempt)
        failure = failures.get(attempt)
        if expected_ends and failure is None:
            yield f"the journal doesn't say why attempt {attempt} ended"
        elif failure and expected_ends and not any(e.is_reported(failure) for e in expected_ends):
            what = f"{failure.kind.name}: {failure}"
            yield f"attempt {attempt} ended for {what}, instead of any of {expected_ends}"


def _committed_twice(run: ChaosRun) -> Iterator[str]:
    journal = entries([(run.directory / "run" / JOURNAL).read_bytes()])
    steps = Counter(entry.step for entry in journal if isinstance(entry, CheckpointCommitted))
    yield from (f"step {step} was committed {n} times" for step, n in steps.items() if n > 1)


def _wrong_model(
    run: ChaosRun, result: Result, model: Files, expected: Files | None
) -> Iterator[str]:
    if run.work == "rows":
        state = json.loads(model.get("state-0.json", b'{"sums": null}'))
        rows = run.subject.data.column("x0").to_pylist()
        yield from wrong_rows(run.directory / "diary", rows, state)
    elif expected is not None:
        differing = [name for name in {*model, *expected} if model.get(name) != expected.get(name)]
        if differing or not model:
            yield f"the model isn't that of an uninterrupted run: {sorted(differing)} differ"
    steps = [metrics.get("step") for metrics in result.history]
    if run.work == "rows" and steps != list(range(1, len(steps) + 1)):
        yield f"the history has the steps {steps}"


def _missing(case: Case, injected: list[InjectedFault]) -> Iterator[str]:
    """Faults that haven't struck: the run proves nothing about them."""
    happened = {(fault.kind, fault.point, fault.rank, fault.attempt) for fault in injected}
    for attempt in {0, *(fault.attempt for fault in case.faults if fault.attempt is not None)}:
        faults = [fault for fault in case.faults if fault.attempt in (attempt, None)]
        # Of two faults at the same time, one may prevent the other.
        if faults and not any((f.kind, f.point, f.rank, attempt) in happened for f in faults):
            yield str(faults)


def _recoveries(
    injected: list[InjectedFault], first_reports: Mapping[int, float]
) -> Iterator[float]:
    last = {fault.attempt: fault.time for fault in injected}
    for attempt, time in last.items():
        if attempt + 1 in first_reports:
            yield first_reports[attempt + 1] - time


def _note(injected: list[InjectedFault], result: Result) -> str:
    if injected and not injected[0].services:
        return "no effect: rank 0 listens on no port at that time"
    return "recovered" if result.restarts else "no effect: no longer needed"


def _files(result: Result) -> Files:
    if result.checkpoint is None:
        return {}
    root = Path(result.checkpoint.path)
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
