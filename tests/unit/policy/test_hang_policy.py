"""When ranks hang for certain, when that is only possible, and who is named."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.config.configs import FailureConfig
from polytrain.events.attempt import WorkerStatus
from polytrain.linux.progress_page import WorkerStage
from polytrain.policy.hangs import Hung, RankStatuses, Suspicious, judge

LIMIT = 300.0


def status(
    rank: int,
    *,
    quiet: float = 0.0,
    idle: float = 0.0,
    stopped: float = 0.0,
    stage: WorkerStage = WorkerStage.TRAINING,
) -> WorkerStatus:
    return WorkerStatus(
        attempt=0,
        rank=rank,
        stage=stage,
        quiet_s=quiet,
        idle_s=idle,
        stopped_s=stopped,
        cpu_s=quiet - idle,
    )


def waiting(rank: int, seconds: float = LIMIT) -> WorkerStatus:
    return status(rank, quiet=seconds, idle=seconds)


def working(rank: int, seconds: float = LIMIT) -> WorkerStatus:
    return status(rank, quiet=seconds)


def verdict(
    *known: WorkerStatus,
    world_size: int = 2,
    done: frozenset[int] = frozenset(),
    steps: dict[int, int] | None = None,
    action: Literal["kill_if_idle", "kill", "warn"] = "kill_if_idle",
    limit: float | None = LIMIT,
) -> Any:
    config = FailureConfig(hang_timeout_s=limit, hang_action=action)
    ranks = RankStatuses(config=config, world_size=world_size)
    for its in known:
        ranks.take(its)
    for rank in done:
        ranks.left(rank)
    return judge(ranks, steps=steps or {})


def test_ranks_that_all_wait_hang_and_none_is_accused() -> None:
    found = verdict(waiting(0), waiting(1))
    assert isinstance(found, Hung)
    assert found.rank is None
    assert found.reason == "no rank has made progress or spent CPU time for 300 s"


def test_the_only_rank_hangs_by_itself() -> None:
    found = verdict(waiting(0), world_size=1)
    assert isinstance(found, Hung)
    assert found.rank == 0
    assert found.reason == "rank 0 has made no progress and spent no CPU time for 300 s"


def test_a_rank_that_nothing_is_known_of_may_be_fine() -> None:
    found = verdict(waiting(0), waiting(1), world_size=3)
    assert isinstance(found, Suspicious)
    assert found.ranks == {0, 1}


def test_a_rank_that_works_holds_the_others_harmlessly() -> None:
    found = verdict(waiting(0), working(1))
    assert isinstance(found, Suspicious)
    assert found.reason == (
        "ranks 0 and 1 have made no progress for 300 s "
        "(rank 0 waits, rank 1 works: 300 s of CPU time)"
    )


def test_what_is_known_soon_is_waited_for() -> None:
    """Agents look at different times: one that is quiet a little longer isn't worth a warning."""
    assert verdict(waiting(0), waiting(1, LIMIT / 2)) is None
    assert isinstance(verdict(waiting(0), waiting(1, LIMIT / 3)), Suspicious)


@pytest.mark.parametrize("stage", [WorkerStage.WAITING_FOR_COMMIT, WorkerStage.WAITING_FOR_DATA])
@pytest.mark.parametrize("action", ["kill_if_idle", "kill"])
def test_a_storage_or_a_pipeline_may_take_as_long_as_it_does(
    stage: WorkerStage, action: Any
) -> None:
    slow = status(0, quiet=LIMIT, idle=LIMIT, stage=stage)
    found = verdict(slow, waiting(1), action=action)
    assert isinstance(found, Suspicious)
    assert f"rank 0 is {stage}" in found.reason


def test_a_rank_that_has_left_is_named() -> None:
    found = verdict(waiting(0), done=frozenset({1}), steps={0: 5, 1: 5})
    assert isinstance(found, Hung)
    assert found.rank == 1
    assert found.reason.startswith(
        "rank 1 left the training function at step 5 while rank 0 waits in it"
    )


def test_ranks_that_have_left_are_all_named() -> None:
    found = verdict(waiting(1), waiting(3), world_size=4, done=frozenset({0, 2}), steps={0: 4})
    assert isinstance(found, Hung)
    assert found.rank is None
    assert found.reason.startswith(
        "ranks 0 and 2 left the training function while ranks 1 and 3 wait in it"
    )


def test_what_a_rank_showed_before_it_was_done_is_past() -> None:
    assert verdict(waiting(0), done=frozenset({0, 1})) is None


def test_a_stopped_process_is_named_after_ten_seconds() -> None:
    assert verdict(status(1, quiet=9, idle=9, stopped=9)) is None
    found = verdict(status(1, quiet=12, idle=10, stopped=10))
    assert isinstance(found, Hung)
    assert (found.rank, found.is_stop) == (1, True)
    assert found.reason == "rank 1 has been stopped by a signal for 10 s"


def test_a_shorter_limit_holds_for_stopped_processes_too() -> None:
    assert isinstance(verdict(status(1, quiet=3, idle=3, stopped=3), limit=3), Hung)


def test_kill_names_the_rank_that_the_others_wait_for() -> None:
    found = verdict(waiting(0), working(1, LIMIT / 2), action="kill")
    assert isinstance(found, Hung)
    assert found.rank == 1


def test_kill_ends_one_that_works() -> None:
    found = verdict(working(1), action="kill")
    assert isinstance(found, Hung)
    assert found.rank == 1
    assert "it works: 300 s of CPU time" in found.reason


def test_a_warning_says_who_has_left() -> None:
    found = verdict(waiting(0), done=frozenset({1}), steps={1: 7}, action="warn")
    assert isinstance(found, Suspicious)
    assert "rank 1 left the training function at step 7 while rank 0 waits" in found.reason


seconds = st.floats(0, 2 * LIMIT)


@st.composite
def anybody(draw: st.DrawFn, world_size: int) -> dict[int, WorkerStatus]:
    known = draw(st.sets(st.integers(0, world_size - 1)))
    drawn = {}
    for rank in known:
        quiet = draw(seconds)
        drawn[rank] = status(
            rank,
            quiet=quiet,
            idle=quiet * draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
            stopped=quiet * draw(st.sampled_from([0.0, 0.0, 0.01, 1.0])),
            stage=draw(
                st.sampled_from(
                    [WorkerStage.TRAINING, WorkerStage.TRAINING, WorkerStage.WAITING_FOR_DATA]
                )
            ),
        )
    return drawn


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), anybody(n))), st.data())
def test_by_default_only_what_is_certain_ends_an_attempt(
    world: tuple[int, dict[int, WorkerStatus]], data: st.DataObject
) -> None:
    size, known = world
    done = frozenset(data.draw(st.sets(st.integers(0, size - 1))))
    found = verdict(*known.values(), world_size=size, done=done)
    inside = set(range(size)) - done
    stopped = any(known[r].stopped_s >= 10 for r in inside & known.keys())
    all_idle = bool(inside) and all(
        r in known and known[r].idle_s >= LIMIT and not known[r].stage.is_wait for r in inside
    )
    assert isinstance(found, Hung) == (stopped or all_idle)
    if isinstance(found, Hung):
        return
    here = {r: known[r] for r in inside & known.keys()}
    named = {r for r, its in here.items() if its.quiet_s >= LIMIT}
    # It will soon be known whether all hang.
    is_soon_known = len(here) == len(inside) and all(
        its.idle_s >= LIMIT / 2 and not its.stage.is_wait for its in here.values()
    )
    assert (found.ranks if found else set()) == (set() if is_soon_known else named)
    if isinstance(found, Suspicious):
        assert all(known[rank].quiet_s >= LIMIT for rank in found.ranks)
    if found is not None:
        assert found.ranks <= inside
        assert found.reason.startswith(("rank", "no rank"))


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), anybody(n))))
def test_a_warning_is_all_that_comes_of_warn_and_nothing_without_a_limit(
    world: tuple[int, dict[int, WorkerStatus]],
) -> None:
    size, known = world
    found = verdict(*known.values(), world_size=size, action="warn")
    message = {r for r, its in known.items() if its.quiet_s >= LIMIT or its.stopped_s >= 10}
    assert (found.ranks if found else frozenset()) == message
    assert not isinstance(found, Hung)
    assert verdict(*known.values(), world_size=size, action="kill", limit=None) is None


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), anybody(n))))
def test_kill_ends_whatever_is_quiet_unless_something_outside_is_waited_for(
    world: tuple[int, dict[int, WorkerStatus]],
) -> None:
    size, known = world
    waits = any(its.stage.is_wait for its in known.values())
    quiet = any(its.quiet_s >= LIMIT for its in known.values())
    stopped = any(its.stopped_s >= 10 for its in known.values())
    found = verdict(*known.values(), world_size=size, action="kill")
    assert isinstance(found, Hung) == (stopped or (quiet and not waits))


@pytest.mark.parametrize("action", ["kill_if_idle", "warn"])
def test_of_thousands_of_ranks_a_message_names_the_first(
    action: Literal["kill_if_idle", "warn"],
) -> None:
    quiet = [working(rank) for rank in range(5000)]
    found = verdict(*quiet, world_size=10_000, action=action)
    assert found.reason.startswith("ranks 0, 1, 2, ")
    assert "15 and 4984 more have made no progress for 300 s (rank 0 works: " in found.reason
    assert len(found.reason) < 2000
    assert found.ranks == frozenset(range(5000))
