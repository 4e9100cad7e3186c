"""The driver of a run: what it asks of its workers, and what it keeps, whatever they say."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.run.driver import BEGAN, Driver, FakeGroup

import polytrain.checkpoint.manager
import polytrain.run
from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.parts import Committed, PartVoid
from polytrain.config.configs import CheckpointConfig, FailureConfig
from polytrain.errors import Failure, FailureKind, RunOwnedError
from polytrain.events.attempt import (
    AgentLost,
    Died,
    Diverged,
    Done,
    Drained,
    DrainWanted,
    Exited,
    Failed,
    Joined,
    Load,
    Started,
    move_wanted,
    stop_wanted,
)
from polytrain.events.notices import LeavingNode, Rollback
from polytrain.events.output import Output
from polytrain.output.observers import Observers
from polytrain.record.journal import Journal
from polytrain.workers.agents.calls import AgentEvent
from polytrain.workers.driver.group import Handler
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import CheckpointKind, Stopped


def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Driver:
    """One whose ranks are done at once; a test gives them another life."""
    made = Driver(tmp_path, monkeypatch, lambda order: made.all_done(), **options)  # type: ignore[arg-type]  # options of Driver
    return made


def lines(path: Path, event: str) -> list[dict[str, object]]:
    """The journal's lines of one kind."""
    entries = map(json.loads, (path / "journal.jsonl").read_text().splitlines())
    return [entry for entry in entries if entry["event"] == event]


def test_a_report_counts_once_though_a_restart_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        steps = [run.reported(rank, step) for step in (1, 2) for rank in (0, 1)]
        if order.attempt == 0:
            run.group.alive.discard(1)
            exit_ = Exited(attempt=0, rank=1, how="killed by SIGKILL", killed=False)
            return [*steps, run.staged(0, 0), run.stored(0, 0, model="1"), exit_]
        return [*steps[2:], *run.all_done()]

    run.life = life
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 1)]
    assert run.controller.journal.history.reports.steps().tolist() == [1, 2]
    assert run.group.of("kill") == [(0,)]


def test_files_of_all_ranks_make_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's agent waits until it is known what rank 0 has stored."""
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.staged(1, 0),
        run.stored(0, 0, both="x", of_0="0"),
        run.stored(1, 0, of_1="1"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.group.of("store_rest") == [(1, 0, ["both", "of_0"])]
    assert run.committed == [["both", "of_0", "of_1"]]
    assert run.group.of("acknowledge") == [(0, [0, 1])]
    [manifest] = run.manager.checkpoints
    assert manifest.written_by == "every_rank"


def test_a_rank_that_comes_after_the_first_commit_is_added_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.stored(0, 0, of_0="0"),
        run.staged(1, 0),
        run.stored(1, 0, of_1="1"),
        # From now on it is waited for.
        run.staged(0, 1),
        run.stored(0, 1, of_0="00"),
        run.staged(1, 1),
        run.stored(1, 1, of_1="11"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.committed == [["of_0", "of_1"], ["of_0", "of_1"]]
    # Rank 1 doesn't hear of a commit that its part isn't in.
    assert run.group.of("acknowledge") == [(0, [0]), (0, [0, 1]), (1, [0, 1])]
    assert len(run.manager.checkpoints) == 2


def test_a_restart_waits_for_the_ranks_that_wrote_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt == 0:
            run.group.alive.discard(1)
            return [
                run.staged(0, 0),
                run.staged(1, 0),
                run.stored(0, 0, of_0="0"),
                run.stored(1, 0, of_1="1"),
                Exited(attempt=0, rank=1, how="killed by SIGKILL", killed=False),
            ]
        number = order.first_checkpoint
        return [run.staged(0, number), run.stored(0, number, of_0="00"), *run.all_done()]

    run.life = life
    conclusion = run.conclude()
    assert not conclusion.succeeded
    assert "rank 1 has reported 0 of them, and rank 0 1" in conclusion.failures[0].message
    assert run.committed == [["of_0", "of_1"]], "half of a checkpoint isn't committed"


def test_ranks_that_add_no_file_may_report_fewer_than_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the ranks' data differ in length. Their parts are compared with rank 0's."""
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.staged(1, 0),
        run.stored(0, 0, model="0"),
        # Rank 0's part isn't committed before it is compared.
        run.stored(1, 0),
        run.staged(0, 1),
        run.stored(0, 1, model="1"),
        run.staged(1, 1),
        run.stored(1, 1),
        run.staged(0, 2),
        run.stored(0, 2, model="2"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.committed == [["model"]] * 3
    assert run.group.of("acknowledge") == [(0, [0, 1]), (1, [0]), (1, [1]), (2, [0])]
    assert [manifest.written_by for manifest in run.manager.checkpoints] == ["rank_0"] * 3


def test_every_checkpoint_is_committed_though_rank_0_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has stored its next part before rank 1's part of this one is compared."""
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.staged(1, 0),
        run.stored(0, 0, model="0"),
        run.staged(0, 1),
        run.stored(0, 1, model="1"),
        run.stored(1, 0),
        run.staged(1, 1),
        run.stored(1, 1),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.committed == [["model"]] * 2
    # Otherwise rank 0 would wait for ever once `max_in_flight` is reached.
    assert run.group.of("acknowledge") == [(0, [0, 1]), (1, [0]), (1, [1])]


def test_a_part_that_has_changed_does_not_hold_up_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.staged(1, 0),
        run.stored(0, 0, model="0"),
        run.staged(0, 1),
        run.stored(0, 1, model="1"),
        PartVoid(attempt=0, rank=1, checkpoint=0, reason="model has changed"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert [manifest.number for manifest in run.manager.checkpoints] == [1]


def test_a_rank_that_reports_more_checkpoints_than_rank_0_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent would wait for a part of rank 0 that never comes."""
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.staged(1, 0),
        run.stored(0, 0, model="0"),
        run.stored(1, 0),
        run.staged(1, 1, waits=True),
        Done(attempt=0, rank=0),
    ]
    [failure] = run.conclude().failures
    assert failure.kind is FailureKind.CHECKPOINT_MISMATCH
    assert "rank 0 has reported 1 of them, and rank 1 2; rank 0 has ended" in failure.message
    assert run.group.of("store_rest") == [(1, 0, ["model"]), (1, 1, None)]
    assert run.committed == [["model"]]


def failing_starts(run: Driver, began: list[float]) -> Callable[[LaunchOrder], list[AgentEvent]]:
    """Attempts that fail before they train; `began` gets the time of each."""

    def life(order: LaunchOrder) -> list[AgentEvent]:
        began.append(run.group.now - BEGAN)
        message = f"OSError: no answer {order.attempt}"
        failure = Failure(kind=FailureKind.STARTUP, rank=0, message=message)
        return [Failed(attempt=order.attempt, failure=failure)]

    return life


def test_starts_that_fail_again_wait_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=-1)
    began: list[float] = []
    run.life = failing_starts(run, began)
    assert not run.conclude().succeeded
    assert began == [0, 0, 1, 3, 7]
    reasons = [line["reason"] for line in lines(tmp_path, "AttemptEnded")]
    pauses = ["", *(f"; the next attempt begins in {s} s" for s in (1, 2, 4))]
    assert reasons == [
        *(f"failure {n}, max_failures is unlimited{pause}" for n, pause in enumerate(pauses, 1)),
        "5 attempts in a row have ended before they trained",
    ]


def in_the_first_pause(
    monkeypatch: pytest.MonkeyPatch, began: list[float], event: DrainWanted
) -> None:
    """Let an event come between the second failed start and the third."""
    wait = FakeGroup.wait
    left = [event]

    def comes_in_the_pause(group: FakeGroup, handle: Handler, timeout: float | None) -> None:
        if len(began) == 2 and timeout and left:
            group.pending.append(left.pop())
            timeout = 0.0
        wait(group, handle, timeout)

    monkeypatch.setattr(FakeGroup, "wait", comes_in_the_pause)


def test_a_stop_ends_a_pause_between_two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=-1)
    began: list[float] = []
    run.life = failing_starts(run, began)
    in_the_first_pause(monkeypatch, began, stop_wanted(Stopped(by="signal", reason="SIGINT")))
    conclusion = run.conclude()
    assert conclusion.stopped is not None
    assert (began, run.group.now) == ([0, 0], BEGAN)


def test_workers_are_placed_on_no_node_that_is_announced_to_go_during_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=-1)
    began: list[float] = []
    run.life = failing_starts(run, began)
    leaving = move_wanted({"node-7": LeavingNode(address="10.77.0.7")})
    in_the_first_pause(monkeypatch, began, leaving)
    assert not run.conclude().succeeded
    avoided = [avoid for avoid, _ in run.group.of("place")]
    assert avoided == [{}, *[{"node-7": math.inf}] * 3]


def test_a_lost_agent_keeps_no_checkpoint_from_being_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.group.alive.discard(1)
        lost = AgentLost(rank=1, reason="its node is gone")
        return [run.staged(0, 0), run.staged(1, 0), run.stored(0, 0, model="0"), lost]

    run.life = life
    assert not run.conclude().succeeded
    assert run.committed == [["model"]]


@pytest.mark.parametrize("is_kept", [False, True], ids=["rank 0 died first", "rank 0 stored it"])
def test_a_part_that_waits_for_rank_0_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """Its agent would wait for ever otherwise."""
    run = driver(tmp_path, monkeypatch)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.group.alive.discard(0)
        exit_ = Exited(attempt=0, rank=0, how="killed by SIGKILL", killed=False)
        kept = [run.staged(0, 0), run.stored(0, 0, of_0="0")] if is_kept else []
        return [*kept, run.staged(1, 0), exit_, run.staged(1, 1)]

    run.life = life
    assert not run.conclude().succeeded
    first = ["of_0"] if is_kept else None
    assert run.group.of("store_rest") == [(1, 0, first), (1, 1, None)]


def test_ranks_that_wait_for_one_that_died_are_ended_though_its_part_waits_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt == 0:
            return [run.staged(1, 0), Died(attempt=0, rank=1, how="killed by SIGKILL")]
        return run.all_done()

    run.life = life
    assert run.conclude().succeeded
    assert run.group.of("store_rest") == [(1, 0, None)]
    [ended] = lines(tmp_path, "AttemptEnded")
    assert isinstance(failure := ended["failure"], dict)
    assert (failure["kind"], failure["rank"]) == (FailureKind.WORKER_LOST.name, 1)
    assert "also" not in str(ended["reason"])


def test_a_late_end_of_an_earlier_attempt_is_not_that_of_the_same_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent didn't answer, was given up, and answers after all."""
    run = driver(tmp_path, monkeypatch, max_failures=1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt == 0:
            run.group.alive.discard(0)
            return [AgentLost(rank=0, reason="its agent hasn't answered")]
        late = [
            Done(attempt=0, rank=0),
            Exited(attempt=0, rank=0, how="killed by SIGKILL", killed=True),
        ]
        staged = [run.staged(1, 0), run.staged(0, 0)]
        stored = [run.stored(0, 0, of_0="0"), run.stored(1, 0, of_1="1")]
        return [*late, *staged, *stored, *run.all_done()]

    run.life = life
    assert run.conclude().succeeded
    assert run.group.of("store_rest") == [(1, 0, ["of_0"])]
    assert run.committed == [["of_0", "of_1"]]


NO_FIT: dict[str, Callable[[Driver], Sequence[AgentEvent]]] = {
    "rank 1 reported 'of_1' for checkpoint 0 only after the run had committed checkpoint 1": (
        lambda run: [run.staged(1, 0), run.stored(1, 0, of_1="1")]
    ),
    "ranks 0 and 1 reported checkpoint 1 at different steps, 2 and 9": (
        lambda run: [run.staged(1, 1), run.stored(1, 1, step=9, of_1="1")]
    ),
    "Ranks 0 and 1 both wrote 'of_0' into one checkpoint, with different content": (
        lambda run: [run.staged(1, 1), run.stored(1, 1, of_0="2")]
    ),
}


@pytest.mark.parametrize("message", NO_FIT)
def test_ranks_that_do_not_fit_together_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.stored(0, 0, of_0="0"),
        run.staged(0, 1),
        run.stored(0, 1, of_0="1"),
        *NO_FIT[message](run),
    ]
    [failure] = run.conclude().failures
    assert failure.kind is FailureKind.CHECKPOINT_MISMATCH
    assert failure.message.startswith(message)
    assert "written_by='rank_0'" in failure.message


def test_a_rank_that_reports_fewer_checkpoints_is_named_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(
        tmp_path,
        monkeypatch,
        kind=CheckpointKind.EVERY_RANK,
        merges_files=False,
        checkpoint_config=CheckpointConfig(report_timeout_s=30),
    )
    run.life = lambda order: [run.staged(0, 0, waits=True), run.stored(0, 0, of_0="0")]
    conclusion = run.conclude()
    assert "rank 1 has reported none for 30 s" in conclusion.failures[0].message
    assert run.group.now == BEGAN + 30
    assert run.committed == []


def test_a_void_part_drops_its_checkpoint_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.staged(1, 0),
        PartVoid(attempt=0, rank=0, checkpoint=0, reason="'model' was written to"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.group.of("store_rest") == [(1, 0, None)]
    assert run.group.of("acknowledge") == [(0, [0, 1])]
    assert run.committed == []
    [line] = lines(tmp_path, "PartVoid")
    assert (line["rank"], line["reason"]) == (0, "'model' was written to")


@pytest.mark.parametrize(("bad", "step"), [((1,), 1), ((0,), 2), ((0, 1), 0)])
def test_a_void_part_takes_back_a_checkpoint_that_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...], step: int
) -> None:
    """What counts from then on is the newest checkpoint that is left."""
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        run.staged(0, 0),
        run.stored(0, 0, of_0="0"),
        run.staged(0, 1),
        run.stored(0, 1, of_0="1"),
        *(
            PartVoid(attempt=0, rank=1, checkpoint=number, reason="'of_1' was written to")
            for number in bad
        ),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.committed == [["of_0"]] * (2 - len(bad))
    assert [manifest.number for manifest in run.manager.checkpoints] == [
        number for number in range(2) if number not in bad
    ]
    assert (run.controller.state.committed, run.controller.state.progress) == (step, step)


def test_a_void_part_that_comes_before_the_commit_leaves_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)
    commit = CheckpointManager.commit

    def meanwhile_void(manager: CheckpointManager, manifest: Manifest) -> Committed:
        if manifest.number == 1:
            reason = "'of_1' was written to"
            run.group.mailbox.put((PartVoid(attempt=0, rank=1, checkpoint=1, reason=reason),))
        return commit(manager, manifest)

    monkeypatch.setattr(CheckpointManager, "commit", meanwhile_void)
    run.life = lambda order: [
        run.staged(0, 0),
        run.stored(0, 0, of_0="0"),
        run.staged(0, 1),
        run.stored(0, 1, of_0="1"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.committed == [["of_0"]]
    assert (run.controller.state.committed, run.controller.state.progress) == (1, 1)


def void(rank: int, number: int = 0) -> PartVoid:
    return PartVoid(attempt=0, rank=rank, checkpoint=number, reason="'model' was written to")


@pytest.mark.parametrize(
    ("of", "merges_files", "late", "has_next"),
    [(0, True, 1, False), (0, True, 1, True), (1, True, 2, False), (1, False, 0, False)],
    ids=["rank 0's part", "after the next commit", "another rank's part", "every rank writes"],
)
def test_a_rank_that_is_late_for_a_void_checkpoint_does_not_wait_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: int,
    merges_files: bool,
    late: int,
    has_next: bool,
) -> None:
    """Otherwise its report would wait for ever once `max_in_flight` is reached."""
    kind = CheckpointKind.ONE_RANK if merges_files else CheckpointKind.EVERY_RANK
    run = driver(tmp_path, monkeypatch, world_size=3, merges_files=merges_files, kind=kind)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        others = [rank for rank in range(3) if rank != late]
        events: list[AgentEvent] = [run.staged(rank, 0) for rank in others]
        if of != 0 and late != 0:
            events.append(run.stored(0, 0, model="0"))
        events.append(void(of))
        if has_next:
            events += [run.staged(0, 1), run.stored(0, 1, model="1")]
        events.append(run.staged(late, 0))
        if not merges_files:
            events.append(run.stored(late, 0, of_late="0"))
        return [*events, *run.all_done()]

    run.life = life
    assert run.conclude().succeeded
    late_calls = [call for call in run.group.calls if call[0] in ("store_rest", "acknowledge")]
    expected: list[tuple[object, ...]] = [("acknowledge", 0, [late])]
    if merges_files:
        # Its agent deletes what it has staged.
        expected.insert(0, ("store_rest", late, 0, None))
    assert late_calls[-len(expected) :] == expected
    assert run.committed == ([["model"]] if has_next else [])


def test_a_part_that_is_stored_after_its_checkpoint_was_left_out_is_no_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, world_size=3)
    run.life = lambda order: [
        *(run.staged(rank, 0) for rank in range(3)),
        run.stored(0, 0, of_0="0"),
        void(2),
        run.staged(0, 1),
        run.stored(0, 1, of_0="1"),
        run.stored(1, 0, of_1="0"),
        run.staged(1, 1),
        run.stored(1, 1, of_1="1"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.committed == [["of_0", "of_1"]]


def test_a_commit_under_way_is_taken_back_if_a_part_turns_out_to_be_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        # As with a thread: its results wait until all events are handled.
        run.group.is_inline = False
        return [
            run.staged(0, 0),
            run.stored(0, 0, of_0="0"),
            run.staged(1, 0),
            void(1),
            *run.all_done(),
        ]

    run.life = life
    assert run.conclude().succeeded
    assert run.committed == []
    assert run.manager.checkpoints == []
    assert lines(tmp_path, "Committed") == []


@pytest.mark.parametrize("num_to_keep", [1, 2])
def test_a_commit_is_taken_back_only_while_there_is_an_older_one_to_go_back_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_to_keep: int,
) -> None:
    kept = CheckpointConfig(num_to_keep=num_to_keep)
    run = driver(tmp_path, monkeypatch, checkpoint_config=kept)
    run.life = lambda order: [
        run.staged(0, 0),
        run.stored(0, 0, model="0"),
        run.staged(0, 1),
        run.stored(0, 1, model="1"),
        run.staged(1, 1),
        void(1, 1),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    # Retention has deleted checkpoint 0, or it hasn't.
    is_last_left = num_to_keep == 1
    assert [each.number for each in run.manager.checkpoints] == [1 if is_last_left else 0]
    assert run.committed == [["model"]]
    assert len(lines(tmp_path, "PartVoid")) == (0 if is_last_left else 1)
    assert ("no older one to go back to" if is_last_left else "is left out") in caplog.text
    assert any(number == 1 and 1 in ranks for number, ranks in run.group.of("acknowledge"))


@pytest.mark.parametrize("last", [2, 3])
def test_a_checkpoint_without_files_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, last: int
) -> None:
    kept = CheckpointConfig(num_to_keep=1)
    run = driver(tmp_path, monkeypatch, world_size=1, checkpoint_config=kept)
    files: list[dict[str, str]] = [{"model": "0"}, {}, {}, {"model": "3"}]
    run.life = lambda order: [
        *(
            event
            for number in range(last + 1)
            for event in (run.staged(0, number), run.stored(0, number, **files[number]))
        ),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.committed == [[["model"], [], []], [["model"]]][last - 2]
    assert caplog.text.count("has no files. Write them before report()") == 1


def test_a_rank_far_behind_rank_0_waits_for_nothing_that_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports more rarely than rank 0, whose files of so old a checkpoint aren't known."""
    monkeypatch.setattr(polytrain.checkpoint.manager, "_REMEMBERED", 1)
    run = driver(tmp_path, monkeypatch)

    def of_rank_0(number: int) -> list[AgentEvent]:
        return [run.staged(0, number), run.stored(0, number, model=f"{number}")]

    run.life = lambda order: [
        *(event for number in range(3) for event in of_rank_0(number)),
        run.staged(1, 0),
        # Now it adds a file, and checkpoints wait for it, however many there are.
        run.staged(1, 1),
        run.stored(1, 1),
        run.staged(1, 2),
        run.stored(1, 2, of_1="2"),
        *(event for number in range(3, 6) for event in of_rank_0(number)),
        *(
            event
            for number in range(3, 6)
            for event in (run.staged(1, number), run.stored(1, number, of_1=f"{number}"))
        ),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    known = [(1, number, ["model"]) for number in range(1, 6)]
    assert run.group.of("store_rest") == [(1, 0, None), *known]
    acknowledged = [number for number, ranks in run.group.of("acknowledge") if 1 in ranks]
    assert acknowledged == [0, 1, 2, 3, 4, 5]
    assert run.committed == [["model"]] * 2 + [["model", "of_1"]] * 4


def test_a_driver_without_its_lease_commits_nothing_and_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=-1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.lease.lost = RunOwnedError("The run was taken over by process 7.")
        return [run.staged(0, 0), run.stored(0, 0, model="1")]

    run.life = life
    conclusion = run.conclude()
    assert [failure.kind for failure in conclusion.failures] == [FailureKind.LEASE_LOST]
    assert run.group.of("launch") == [(0, 0)]
    assert run.committed == []


@pytest.mark.parametrize("method", ["_end", "place"])
def test_a_driver_that_loses_its_lease_between_attempts_waits_for_no_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It would hold what the other driver waits for. A machine that was suspended loses both."""
    run = driver(tmp_path, monkeypatch, max_failures=-1)
    before = getattr(FakeGroup, method)

    def take_over(group: FakeGroup, *arguments: Any, **options: Any) -> None:
        if method == "_end" or group.order is None:
            before(group, *arguments, **options)
        if group.order is not None:
            run.lease.lost = RunOwnedError("The run was taken over by process 7.")
            run.lease.when_lost()

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.group.alive.discard(1)
        return [AgentLost(rank=1, reason="its node is gone")]

    monkeypatch.setattr(FakeGroup, method, take_over)
    run.life = life
    conclusion = run.conclude()
    assert conclusion.reason == "this driver has lost its lease on the run"
    assert conclusion.failures[0].kind is FailureKind.LEASE_LOST
    assert len(run.group.of("place")) == 1


def test_a_stop_is_heard_with_the_report_in_which_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inline run has no other moment: its training function runs in the driver's thread."""
    run = driver(tmp_path, monkeypatch)
    stopped = Stopped(by="observer", reason="interrupted")
    monkeypatch.setattr(Observers, "reported", lambda *_: run.stop_requests.request(stopped))
    reports_before: list[int] = []
    monkeypatch.setattr(
        FakeGroup,
        "drain",
        lambda *_: reports_before.append(len(run.controller.journal.history.reports)),
    )
    run.life = lambda order: [
        run.reported(0, 1),
        run.reported(0, 2),
        Drained(attempt=0, rank=0),
    ]
    run.conclude()
    assert reports_before == [1]


def test_a_stop_waits_for_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)
    stopped = Stopped(by="observer", reason="enough")

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.stop_requests.request(stopped)
        part = [run.staged(0, 0, waits=True), run.stored(0, 0, model="1")]
        return [run.reported(0, 1), *part, Drained(attempt=0, rank=0)]

    run.life = life
    conclusion = run.conclude()
    assert run.group.of("drain") == [(0,)]
    assert run.committed == [["model"]]
    assert (conclusion.succeeded, conclusion.stopped) == (False, stopped)


def test_ranks_that_never_meet_end_the_attempt_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, failure_config=FailureConfig(rendezvous_timeout_s=20))
    monkeypatch.setattr(FakeGroup, "meet", lambda group, attempt: None)
    [failure] = run.conclude().failures
    assert failure.kind is FailureKind.STARTUP
    assert "rendezvous_timeout_s=20" in failure.message
    assert failure.stacks == {0: "at rest", 1: "at rest"}
    assert 20 <= run.group.now - BEGAN < 40


def test_what_raises_after_a_peer_is_lost_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.group.alive.discard(1)
        noise = Failure(
            kind=FailureKind.USER_ERROR, rank=0, message="RuntimeError: Connection reset by peer"
        )
        return [
            Failed(attempt=0, failure=noise),
            Exited(attempt=0, rank=1, how="killed by SIGKILL", killed=False),
        ]

    run.life = life
    conclusion = run.conclude()
    assert [(failure.kind, failure.rank) for failure in conclusion.failures] == [
        (FailureKind.WORKER_LOST, 1)
    ]


def test_done_ranks_leave_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = driver(tmp_path, monkeypatch, world_size=3)
    run.life = lambda order: [
        Done(attempt=0, rank=2),
        Joined(attempt=0, rank=1),
        Done(attempt=0, rank=0),
        Done(attempt=0, rank=1),
    ]
    assert run.conclude().succeeded
    assert run.group.of("kill") == []


def test_a_rank_that_never_has_its_rows_ends_the_attempt_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent hangs in a read, or in fetching the checkpoint: no process was asked for."""
    run = driver(tmp_path, monkeypatch, failure_config=FailureConfig(load_timeout_s=50))

    def launch(group: FakeGroup, order: LaunchOrder) -> None:
        group.order, group.alive = order, {0, 1}
        group.pending.append(Started(attempt=order.attempt, rank=0))

    monkeypatch.setattr(FakeGroup, "launch", launch)
    [failure] = run.conclude().failures
    assert (failure.kind, failure.rank) == (FailureKind.STARTUP, 1)
    assert "has not loaded the data and the starting checkpoint within 50 s" in failure.message
    assert "FailureConfig(load_timeout_s=…)" in failure.message
    assert 50 <= run.group.now - BEGAN < 70


@pytest.mark.parametrize("moment", ["while it commits", "before it deletes"])
def test_a_driver_that_was_paused_deletes_nothing_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What the other driver has started from is what this one's retention would delete."""
    run = driver(tmp_path, monkeypatch, checkpoint_config=CheckpointConfig(num_to_keep=1))
    taken = RunOwnedError("The run was taken over by process 7.")

    def take_over(*_: object) -> None:
        run.lease.lost = taken

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if moment == "while it commits":
            monkeypatch.setattr(
                CheckpointManager, "commit", followed_by(take_over, CheckpointManager.commit, 2)
            )
        else:
            monkeypatch.setattr(
                CheckpointManager,
                "committed",
                followed_by(take_over, CheckpointManager.committed, 2),
            )
        parts = [[run.staged(0, n), run.stored(0, n, model=str(n))] for n in (0, 1)]
        return [*parts[0], *parts[1]]

    run.life = life
    conclusion = run.conclude()
    assert {failure.kind for failure in conclusion.failures} == {FailureKind.LEASE_LOST}
    assert run.committed == [["model"], ["model"]]


def followed_by(
    action: Callable[..., None], method: Callable[..., Any], calls: int
) -> Callable[..., Any]:
    """A method after whose call of this number something happens."""
    called = 0

    def both(*arguments: Any) -> Any:
        nonlocal called
        called += 1
        answer = method(*arguments)
        if called == calls:
            action()
        return answer

    return both


def test_a_journal_that_grows_in_memory_is_synced_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, syncs = driver(tmp_path, monkeypatch), []
    monkeypatch.setattr(Journal, "wants_sync", True)
    monkeypatch.setattr(Journal, "sync", lambda journal: syncs.append(len(journal.history.reports)))

    run.life = lambda order: [
        *(run.reported(rank, step) for step in (1, 2) for rank in (0, 1)),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert syncs == [0, 1, 2, 2]  # the first and the last when the run begins and ends


def test_the_journal_has_how_busy_all_ranks_were_and_where_one_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, max_failures=1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        def load(rank: int, window: int, busy: float) -> Load:
            return Load(attempt=order.attempt, rank=rank, window=window, busy=busy)

        if order.attempt == 1:
            return run.all_done()
        run.group.alive.discard(1)
        return [
            load(1, 0, 0.999),
            load(0, 0, 0.25),
            load(0, 1, 0.5),  # that of rank 1 never comes
            Output(attempt=0, rank=1, stream="stderr", text="no memory is left\n"),
            Exited(attempt=0, rank=1, how="killed by SIGKILL", killed=False),
        ]

    run.life = life
    assert run.conclude().succeeded
    [window] = lines(tmp_path, "Load")
    assert (window["attempt"], window["window"], window["busy"]) == (0, 0, [0.25, 1.0])
    [ended] = lines(tmp_path, "AttemptEnded")
    failure = ended["failure"]
    assert isinstance(failure, dict)
    assert (failure["rank"], failure["host"]) == (1, "127.0.0.1")
    assert failure["last_lines"] == ["no memory is left"]


def test_agents_that_wait_for_rank_0s_part_get_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray a call is a message to each host: a call for each rank would be thousands."""
    run = driver(tmp_path, monkeypatch, world_size=3)
    run.life = lambda order: [
        *(run.staged(rank, 0) for rank in range(3)),
        run.stored(0, 0, model="0"),
        *(run.stored(rank, 0) for rank in (1, 2)),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert run.group.of("store_rest") == [(1, 2, 0, ["model"])]


def lost(rank: int) -> AgentLost:
    return AgentLost(rank=rank, reason="its host is gone", kind=FailureKind.NODE_LOST)


def exited(rank: int) -> Exited:
    return Exited(attempt=0, rank=rank, how="killed by SIGKILL", killed=False)


@pytest.mark.parametrize("last", [exited(0), lost(0)], ids=["exit", "agent"])
def test_a_commit_that_comes_with_the_last_loss_is_known_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: AgentEvent
) -> None:
    run = driver(tmp_path, monkeypatch)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.group.alive.clear()
        # As with a thread: its results wait until all events are handled.
        run.group.is_inline = False
        stored = run.stored(0, 0, model="1")
        return [run.reported(0, 1), run.staged(0, 0), stored, exited(1), last]

    run.life = life
    assert not run.conclude().succeeded
    newest = run.manager.newest()
    assert newest is not None
    assert newest.step == 1
    assert [each["step"] for each in lines(tmp_path, "Committed")] == [1]


def test_a_checkpoint_that_a_lost_rank_held_up_is_committed_before_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 had staged its files: without them the rest is the checkpoint."""
    run = driver(tmp_path, monkeypatch)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        run.group.alive.clear()
        staged = [run.staged(0, 0), run.staged(1, 0), run.stored(0, 0, model="1")]
        return [*staged, exited(0), lost(1)]

    run.life = life
    assert not run.conclude().succeeded
    newest = run.manager.newest()
    assert newest is not None
    assert newest.step == 1


def test_a_divergence_that_leaves_no_checkpoint_says_that_the_run_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 finds at step 3 that nothing was good, when rank 0 has made two checkpoints."""
    run = driver(tmp_path, monkeypatch, on_divergence="rollback", max_rollbacks=1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt:
            return run.all_done()
        found = Rollback(attempt=0, rank=1, step=3, good_step=0, reason="loss is nan", skipped={})
        made = [(run.staged(0, at), run.stored(0, at, model=str(at))) for at in (0, 1)]
        diverged = Diverged(attempt=0, found=found)
        return [*made[0], *made[1], diverged]

    run.life = life
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 0)]
    said = "all 2 checkpoints may hold what has diverged, so the run starts from its beginning"
    [ended] = lines(tmp_path, "AttemptEnded")
    assert str(ended["reason"]).endswith(said)
    assert caplog.text.count(said) == 1
    assert "No checkpoint has been committed" not in caplog.text


def test_a_commit_says_how_far_divergence_can_still_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 hasn't reported when the first two are committed, and lags at the third."""
    run = driver(tmp_path, monkeypatch, on_divergence="rollback")

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        def made(at: int) -> Sequence[AgentEvent]:
            part = run.stored(0, at, model=str(at))
            return [run.reported(0, at + 1), run.staged(0, at), part]

        lagging = [run.reported(1, step) for step in (1, 2)]
        return [*made(0), *made(1), *lagging, *made(2), *run.all_done()]

    run.life = life
    assert run.conclude().succeeded
    assert [each["good_step"] for each in lines(tmp_path, "Committed")] == [1, 2, 2]


def test_a_report_asks_nobody_who_has_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one wait to the next: who has news, or is late, puts it into the mailbox itself."""
    run = driver(tmp_path, monkeypatch)
    entered: set[str] = set()
    pending_reports: list[AgentEvent] = []

    def wait(group: FakeGroup, handle: Handler, timeout: float | None) -> None:
        sys.setprofile(None)
        if group.pending or not group.mailbox.empty() or not pending_reports:
            original(group, handle, timeout)
            return
        sys.setprofile(lambda frame, *_: entered.add(Path(frame.f_code.co_filename).stem))
        handle(pending_reports.pop(0))
        if not pending_reports:
            group.pending += run.all_done()

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        pending_reports.extend([run.reported(0, 1), run.reported(1, 1)])
        return []

    original = FakeGroup.wait
    monkeypatch.setattr(FakeGroup, "wait", wait)
    run.life = life
    assert run.conclude().succeeded
    of_the_driver = {path.stem for path in Path(polytrain.run.__file__).parent.glob("*.py")}
    assert entered & of_the_driver == {
        "controller",
        "deadlines",
        "interrupts",
        "machine",
        "publisher",
    }
