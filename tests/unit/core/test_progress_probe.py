"""What looks at a trainer add up to: quiet, idle and stopped seconds, told when they matter."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from polytrain.monitoring.health_events import Vitals
from polytrain.monitoring.progress_page import Stage
from polytrain.monitoring.progress_probe import Condition, ProgressProbe

LIMIT = 100.0


@dataclass
class Trainer:
    """A trainer of which everything is known, looked at once a second."""

    limit: float = LIMIT
    now: float = 1000.0
    beats: int = 0
    cpu: float = 50.0
    stage: Stage = Stage.TRAINING
    told: list[Vitals] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.progress = ProgressProbe(attempt=3, rank=1, timeout_s=self.limit, now=self.now)
        self.look(0.0)

    def look(
        self, after: float = 1.0, *, cpu: float = 0.0, stopped: bool = False, traced: bool = False
    ) -> Vitals | None:
        self.now += after
        self.cpu += cpu

        def condition() -> Condition:
            self.asked += 1
            return Condition(cpu_s=self.cpu, is_stopped=stopped, is_traced=traced)

        found = self.progress.look(
            self.now, beats=self.beats, stage=self.stage, condition=condition
        )
        if found is not None:
            self.told.append(found)
        return found

    def go(self, seconds: int, *, cpu: float = 0.0, stopped: bool = False) -> list[Vitals]:
        """Look so many times; what was told."""
        before = len(self.told)
        for _ in range(seconds):
            self.look(cpu=cpu, stopped=stopped)
        return self.told[before:]


def test_a_trainer_that_makes_progress_is_neither_told_of_nor_looked_into() -> None:
    trainer = Trainer()
    for _ in range(500):
        trainer.beats += 1
        trainer.look(cpu=1.0)
    assert trainer.told == []
    assert trainer.asked == 0


def test_one_that_waits_is_told_of_at_half_time_and_at_the_end() -> None:
    trainer = Trainer()
    told = trainer.go(500)
    assert [vitals.quiet_s for vitals in told] == [50.0, 51.0, 100.0, 101.0]
    # Nobody knows what it did before it was looked at for the first time.
    assert [vitals.idle_s for vitals in told] == [49.0, 50.0, 99.0, 100.0]
    assert {(vitals.attempt, vitals.rank) for vitals in told} == {(3, 1)}


def test_one_that_works_is_never_idle() -> None:
    told = Trainer().go(500, cpu=0.02)
    assert [vitals.quiet_s for vitals in told] == [50.0, 100.0]
    assert all(vitals.idle_s < 10 for vitals in told)
    assert told[-1].cpu_s > 1.9


def test_background_threads_are_no_work() -> None:
    assert Trainer().go(500, cpu=0.004)[-1].idle_s >= LIMIT


def test_work_before_the_wait_only_delays_what_is_said_of_it() -> None:
    trainer = Trainer()
    trainer.go(40, cpu=1.0)
    told = trainer.go(200)
    assert told[-1].idle_s >= LIMIT
    assert told[-1].quiet_s >= LIMIT + 39


def test_progress_is_told_once_to_whoever_was_worried() -> None:
    trainer = Trainer()
    trainer.go(120)
    trainer.beats += 1
    [told] = trainer.go(20)
    assert (told.quiet_s, told.idle_s, told.cpu_s) == (0.0, 0.0, 0.0)


def test_a_stopped_process_is_told_of_after_ten_seconds_and_when_it_goes_on() -> None:
    trainer = Trainer()
    [told] = trainer.go(12, stopped=True)
    assert told.stopped_s == 10.0
    [told] = trainer.go(2)
    assert told.stopped_s == 0.0


def test_a_wait_for_the_outside_is_told_with_the_quiet() -> None:
    trainer = Trainer()
    trainer.go(60)
    trainer.stage = Stage.WAITING_FOR_COMMIT
    [told] = trainer.go(2)
    assert told.stage is Stage.WAITING_FOR_COMMIT


def test_what_a_debugger_holds_is_not_idle() -> None:
    trainer = Trainer()
    for _ in range(300):
        trainer.look(traced=True)
    assert all(vitals.idle_s == 0 for vitals in trainer.told)


def test_a_machine_that_stood_still_has_not_waited() -> None:
    """After a pause of all its processes a trainer has its full time again."""
    trainer = Trainer()
    trainer.go(10)
    assert trainer.look(1000.0) is None
    assert trainer.go(30) == []


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
    trainer = Trainer(limit=10.0)
    progress = work = go = trainer.now
    for after, beats, cpu, stopped, traced in looks:
        trainer.beats += beats
        found = trainer.look(after, cpu=cpu, stopped=stopped, traced=traced)
        if beats:
            progress = trainer.now
        if beats or cpu > 0.05 + 0.005 * (trainer.now - progress) or traced:
            work = trainer.now
        if not stopped:
            go = trainer.now
        if found is not None:
            slack = 1e-6
            assert found.quiet_s <= trainer.now - progress + slack
            assert found.idle_s <= trainer.now - work + slack
            assert found.stopped_s <= trainer.now - go + slack
            assert found.idle_s <= found.quiet_s + slack
