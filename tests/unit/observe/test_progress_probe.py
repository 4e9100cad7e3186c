"""What looks at a worker add up to: quiet, idle and stopped seconds, reported when they matter."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from polytrain.events.attempt import WorkerStatus
from polytrain.linux.progress_page import WorkerStage
from polytrain.observe.probes import Condition, ProgressProbe

LIMIT = 100.0


@dataclass
class Worker:
    """A worker of which everything is known, looked at once a second."""

    limit: float = LIMIT
    now: float = 1000.0
    beats: int = 0
    cpu: float = 50.0
    stage: WorkerStage = WorkerStage.TRAINING
    events: list[WorkerStatus] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.progress = ProgressProbe(attempt=3, rank=1, timeout_s=self.limit, now=self.now)
        self.look(0.0)

    def look(
        self, after: float = 1.0, *, cpu: float = 0.0, stopped: bool = False, traced: bool = False
    ) -> WorkerStatus | None:
        self.now += after
        self.cpu += cpu

        def condition() -> Condition:
            self.asked += 1
            return Condition(cpu_s=self.cpu, is_stopped=stopped, is_traced=traced)

        found = self.progress.look(
            self.now, beats=self.beats, stage=self.stage, condition=condition
        )
        if found is not None:
            self.events.append(found)
        return found

    def go(self, seconds: int, *, cpu: float = 0.0, stopped: bool = False) -> list[WorkerStatus]:
        """Look so many times; return the new events."""
        before = len(self.events)
        for _ in range(seconds):
            self.look(cpu=cpu, stopped=stopped)
        return self.events[before:]


def test_a_worker_that_makes_progress_is_not_reported() -> None:
    worker = Worker()
    for _ in range(500):
        worker.beats += 1
        worker.look(cpu=1.0)
    assert worker.events == []
    assert worker.asked == 0


def test_one_that_waits_is_reported_at_half_time_and_at_the_end() -> None:
    worker = Worker()
    events = worker.go(500)
    assert [status.quiet_s for status in events] == [50.0, 51.0, 100.0, 101.0]
    # Nobody knows what it did before it was looked at for the first time.
    assert [status.idle_s for status in events] == [49.0, 50.0, 99.0, 100.0]
    assert {(status.attempt, status.rank) for status in events} == {(3, 1)}


def test_one_that_works_is_never_idle() -> None:
    events = Worker().go(500, cpu=0.02)
    assert [status.quiet_s for status in events] == [50.0, 100.0]
    assert all(status.idle_s < 10 for status in events)
    assert events[-1].cpu_s > 1.9


def test_background_threads_are_no_work() -> None:
    assert Worker().go(500, cpu=0.004)[-1].idle_s >= LIMIT


def test_work_before_the_wait_only_delays_what_is_said_of_it() -> None:
    worker = Worker()
    worker.go(40, cpu=1.0)
    events = worker.go(200)
    assert events[-1].idle_s >= LIMIT
    assert events[-1].quiet_s >= LIMIT + 39


def test_progress_is_reported_once_to_whoever_was_worried() -> None:
    worker = Worker()
    worker.go(120)
    worker.beats += 1
    [latest] = worker.go(20)
    assert (latest.quiet_s, latest.idle_s, latest.cpu_s) == (0.0, 0.0, 0.0)


def test_a_stopped_process_is_reported_after_ten_seconds_and_when_it_goes_on() -> None:
    worker = Worker()
    [latest] = worker.go(12, stopped=True)
    assert latest.stopped_s == 10.0
    [latest] = worker.go(2)
    assert latest.stopped_s == 0.0


def test_a_wait_for_the_outside_is_reported_with_the_quiet() -> None:
    worker = Worker()
    worker.go(60)
    worker.stage = WorkerStage.WAITING_FOR_COMMIT
    [latest] = worker.go(2)
    assert latest.stage is WorkerStage.WAITING_FOR_COMMIT


def test_what_a_debugger_holds_is_not_idle() -> None:
    worker = Worker()
    for _ in range(300):
        worker.look(traced=True)
    assert all(status.idle_s == 0 for status in worker.events)


def test_a_machine_that_stood_still_has_not_waited() -> None:
    """After a pause of all its processes a worker has its full time again."""
    worker = Worker()
    worker.go(10)
    assert worker.look(1000.0) is None
    assert worker.go(30) == []


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 30), st.booleans(), st.floats(0, 2), st.booleans(), st.booleans()
        ),
        max_size=60,
    )
)
def test_nothing_is_ever_exaggerated(
    looks: list[tuple[float, bool, float, bool, bool]],
) -> None:
    worker = Worker(limit=10.0)
    progress = work = go = worker.now
    for after, beats, cpu, stopped, traced in looks:
        worker.beats += beats
        found = worker.look(after, cpu=cpu, stopped=stopped, traced=traced)
        if beats:
            progress = worker.now
        if beats or cpu > 0.05 + 0.005 * (worker.now - progress) or traced:
            work = worker.now
        if not stopped:
            go = worker.now
        if found is not None:
            slack = 1e-6
            assert found.quiet_s <= worker.now - progress + slack
            assert found.idle_s <= worker.now - work + slack
            assert found.stopped_s <= worker.now - go + slack
            assert found.idle_s <= found.quiet_s + slack
