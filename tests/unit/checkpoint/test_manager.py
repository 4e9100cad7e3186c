"""The index of a run's checkpoints: what counts, what is kept, and in which order it happens."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.checkpoints import ATTEMPT, directories, store_in, store_part

from polytrain.checkpoint.manager import CheckpointManager, is_good
from polytrain.checkpoint.manifest import MANIFEST_NAME, AttemptId, directory_name
from polytrain.checkpoint.parts import PartStored
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.configs import CheckpointConfig
from polytrain.events.notices import Rollback
from polytrain.storage.location import Location
from polytrain_plugins import CheckpointInfo, CheckpointKind


class Kept:
    """A keeper, used as the controller does."""

    def __init__(
        self,
        path: Path | Location,
        *,
        attempt_id: AttemptId = ATTEMPT,
        kind: CheckpointKind = CheckpointKind.ONE_RANK,
        **config: Any,
    ) -> None:
        self.attempt_id = attempt_id
        self.manager = CheckpointManager(
            store=store_in(path),
            config=CheckpointConfig(**config),
            backend="reference",
            kind=kind,
            versions={"python": "3.11"},
            world_size=2,
            token=attempt_id.token,
        )
        self.manager.launched(2)

    @property
    def store(self) -> CheckpointStore:
        return self.manager.store

    def part(
        self, number: int, *, rank: int = 0, name: str | None = None, **metrics: Any
    ) -> PartStored:
        """One rank's part of a checkpoint, in its final place. Its step is ten times its number."""
        files = {name or f"model-{rank}": f"{number} of {rank}"}
        return PartStored(
            attempt=self.attempt_id.attempt,
            rank=rank,
            checkpoint=number,
            step=10 * number,
            metrics=metrics,
            positions={},
            files=store_part(self.store, number, rank, attempt_id=self.attempt_id, **files),
        )

    def take(self, part: PartStored) -> CheckpointInfo | None:
        """Add a part; if that makes a checkpoint, commit it and delete what may go."""
        self.manager.add(part)
        manifest = self.manager.next_complete()
        if manifest is None:
            return None
        info, doomed = self.manager.committed(self.manager.commit(manifest))
        for directory in doomed:
            self.store.delete(directory)
        return info

    def save(self, number: int, **metrics: Any) -> CheckpointInfo:
        """Commit a checkpoint of rank 0's."""
        info = self.take(self.part(number, **metrics))
        assert info is not None
        return info


def names(*numbers: int, attempt_id: AttemptId = ATTEMPT) -> list[str]:
    return [directory_name(number, attempt_id) for number in numbers]


def every_rank(path: Path) -> Kept:
    return Kept(path, kind=CheckpointKind.EVERY_RANK)


def test_one_rank_is_enough_where_the_state_is_replicated(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    committed = one.save(1, loss=0.5)
    assert (committed.step, committed.metrics) == (10, {"loss": 0.5})
    assert one.manager.newest_intact() == committed
    assert (Path(committed.path) / "model-0").exists()


def test_every_rank_is_needed_where_the_state_is_sharded(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    assert every.take(every.part(0, rank=1, loss=9)) is None
    assert every.manager.newest_intact() is None
    # What one rank says twice is not what two ranks say.
    other = every.part(1, rank=1)
    assert every.take(other) is None
    assert every.take(other) is None
    committed = every.take(every.part(0, rank=0, loss=1))
    assert committed is not None
    assert committed.metrics == {"loss": 1}, "rank 0's metrics are the checkpoint's"
    [manifest] = every.manager.checkpoints
    assert {file.name: file.rank for file in manifest.files} == {"model-0": 0, "model-1": 1}
    assert manifest.world_size == 2
    assert manifest.written_by == "every_rank"


def test_what_a_manifest_tells_is_what_was_true(tmp_path: Path) -> None:
    one = Kept(tmp_path, attempt_id=AttemptId(token=3, attempt=2))
    one.save(4, loss=0.5)
    [manifest] = one.store.find(since_token=1).manifests
    assert manifest.attempt_id == AttemptId(token=3, attempt=2)
    assert (manifest.number, manifest.step, manifest.metrics) == (4, 40, {"loss": 0.5})
    assert (manifest.backend, manifest.versions) == ("reference", {"python": "3.11"})
    assert manifest.written_by == "rank_0"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest.created)


def test_numbers_go_on_after_those_that_anybody_has_begun(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    assert every.manager.next_number == 0
    every.take(every.part(0, rank=0))
    every.take(every.part(1, rank=1))
    assert every.manager.next_number == 2
    every.take(every.part(0, rank=1))
    assert every.manager.next_number == 2


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    first, second = one.save(0), one.save(1)
    (Path(second.path) / "model-0").unlink()
    assert one.manager.newest_intact() == first


def test_only_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    one = Kept(tmp_path, num_to_keep=1, checkpoint_score_attribute="auc")
    for number, auc in enumerate([0.5, 0.9, 0.7, 0.6]):
        one.save(number, auc=auc)
    assert directories(one.store) == names(1, 3)
    assert [info.metrics["auc"] for info in one.manager.best()] == [0.9, 0.6]


def test_the_older_is_there_until_the_newer_is_committed(tmp_path: Path) -> None:
    one = Kept(tmp_path, num_to_keep=1)
    older = one.save(0)
    one.manager.add(one.part(1))
    manifest = one.manager.next_complete()
    assert manifest is not None
    (Path(one.store.location_of(manifest.directory).address) / "model-0").unlink()
    with pytest.raises(OSError, match="model-0 is missing"):
        one.manager.commit(manifest)
    assert one.manager.newest_intact() == older
    assert (Path(older.path) / "model-0").exists()


def test_a_checkpoint_outlives_a_sweep_and_the_rest_does_not(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    for rank in (0, 1):
        every.take(every.part(0, rank=rank))
    every.take(every.part(1, rank=0))
    every.store.sweep(before=AttemptId(token=1, attempt=1))
    assert directories(every.store) == names(0)
    assert every.manager.newest_intact() is not None


def test_the_parts_of_a_dead_attempt_are_forgotten(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    every.take(every.part(0, rank=0))
    every.manager.launched(2)
    every.attempt_id = AttemptId(token=1, attempt=1)
    number = every.manager.next_number
    assert number == 1, "a number isn't used twice"
    # Whatever number they give it: half of it is the dead attempt's.
    assert every.take(every.part(0, rank=1)) is None
    assert every.take(every.part(number, rank=0)) is None
    committed = every.take(every.part(number, rank=1))
    assert committed is not None
    assert committed.step == 10
    assert [m.attempt_id for m in every.manager.checkpoints] == [every.attempt_id]


@pytest.mark.parametrize("other", ["before", "after"])
def test_a_checkpoint_that_was_dropped_never_comes_to_be(tmp_path: Path, other: str) -> None:
    every = every_rank(tmp_path)
    if other == "before":
        every.take(every.part(0, rank=1))
    assert every.manager.drop(0, attempt=0) is None
    if other == "after":
        every.take(every.part(0, rank=1))
    assert every.manager.newest_intact() is None
    every.take(every.part(1, rank=0))
    assert every.take(every.part(1, rank=1)) is not None
    assert [m.number for m in every.manager.checkpoints] == [1]


def test_ranks_that_write_the_same_file_with_different_content_are_named(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    every.take(every.part(0, rank=1, name="model"))
    with pytest.raises(ValueError, match=r"Ranks 0 and 1 both wrote 'model'.*names of their own"):
        every.take(every.part(0, rank=0, name="model"))
    assert every.manager.newest_intact() is None
    assert every.store.find(since_token=1).manifests == ()


def test_ranks_that_stand_at_different_rows_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    every = every_rank(tmp_path)
    positions = [{"train": {"epoch": 0, "start": start}} for start in (8, 12)]
    parts = [replace(every.part(0, rank=rank), positions=positions[rank]) for rank in (0, 1)]
    every.take(parts[1])
    assert caplog.text == ""
    assert every.take(parts[0]) is not None
    assert "Ranks 0 and 1 reported checkpoint 0 at different rows of the data set 'train'" in (
        caplog.text
    )
    assert every.manager.start().positions == positions[0]
    caplog.clear()
    for rank in (0, 1):
        every.take(replace(every.part(1, rank=rank), positions=positions[rank]))
    assert len(every.manager.checkpoints) == 2
    assert caplog.text == ""


def test_a_run_begins_where_it_was_reported_to_and_goes_on_from_its_own(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    origin = StartingPoint(location=Location.of(tmp_path / "another run"), step=5)
    one.manager.origin = origin
    assert one.manager.start() == origin
    info = one.save(1)
    start = one.manager.start()
    assert (start.path, start.step, start.own) == (info.path, 10, True)
    assert [file.name for file in start.files or ()] == ["model-0"]


def spoil(info: CheckpointInfo, how: str) -> str:
    """Damage a checkpoint; return what is wrong with it."""
    file = Path(info.path, "model-0")
    match how:
        case "missing":
            file.unlink()
            return "model-0 is missing"
        case "short":
            file.write_text("")
            return "model-0 has 0 bytes instead of 6"
        case "changed":
            file.write_text("9 of 9")
            return "model-0 differs from what was committed"
        case "torn":
            manifest = Path(info.path, MANIFEST_NAME)
            manifest.write_text(manifest.read_text()[:100])
            return "its manifest can't be read"
    raise AssertionError(how)


def test_a_part_that_is_being_stored_holds_up_the_later_checkpoints(tmp_path: Path) -> None:
    """They would replace a checkpoint that both ranks have reported."""
    one = Kept(tmp_path)
    one.manager.merges_files = True
    one.manager.expect(1, 0)
    assert one.take(one.part(0)) is None
    assert one.take(one.part(1)) is None
    first = one.take(replace(one.part(0, rank=1), files=()))
    assert first is not None
    second = one.manager.next_complete()
    assert second is not None
    one.manager.committed(one.manager.commit(second))
    assert [manifest.number for manifest in one.manager.checkpoints] == [0, 1]


def test_a_dropped_checkpoint_no_longer_holds_up_the_later_ones(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    one.manager.merges_files = True
    one.manager.expect(1, 0)
    assert one.take(one.part(0)) is None
    assert one.take(one.part(1)) is None
    one.manager.drop(0, attempt=0)
    manifest = one.manager.next_complete()
    assert manifest is not None
    assert manifest.number == 1


HOW = ["missing", "short", "changed", "torn"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_checkpoint_is_reported_and_deleted_after_the_next_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    one = Kept(tmp_path, num_to_keep=3)
    first, second, third = (one.save(number, loss=number) for number in range(3))
    found = {info.path: spoil(info, how) for info in (second, third)}
    assert one.manager.start().path == first.path
    for path, wrong in found.items():
        assert any(path in line and wrong in line for line in caplog.text.splitlines())
    assert [info.path for info in one.manager.best()] == [first.path]
    assert directories(one.store) == names(0, 1, 2), "nothing goes before something newer is there"
    caplog.clear()
    one.save(3)
    assert directories(one.store) == names(0, 3)
    assert one.manager.newest_intact() is not None
    assert caplog.text == "", "it is told once"


@pytest.mark.parametrize("how", HOW)
def test_another_driver_tells_of_what_is_damaged_and_keeps_it_where_all_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    before = Kept(tmp_path)
    first, second = before.save(0), before.save(1)
    wrong = spoil(second, how)
    attempt_id = AttemptId(token=2, attempt=0)
    now = Kept(tmp_path, attempt_id=attempt_id)
    now.manager.take_over(now.store.find(since_token=1))
    assert now.manager.start().path == first.path
    assert second.path in caplog.text
    assert wrong in caplog.text
    now.save(now.manager.next_number)
    new = directory_name(now.manager.checkpoints[-1].number, attempt_id)
    assert directories(now.store) == sorted([*names(0, 1), new])
    # Nothing of it is used.
    assert [info.path for info in now.manager.best()][1:] == [first.path]


def test_a_driver_goes_on_with_the_checkpoints_of_those_before(tmp_path: Path) -> None:
    before = Kept(tmp_path)
    infos = [before.save(number, loss=number) for number in (0, 3)]
    attempt_id = AttemptId(token=2, attempt=0)
    now = Kept(tmp_path, attempt_id=attempt_id, num_to_keep=1)
    now.manager.take_over(now.store.find(since_token=1))
    assert now.manager.next_number == 4
    assert now.manager.newest_intact() == infos[1]
    assert [info.path for info in now.manager.best()] == [infos[1].path, infos[0].path]
    now.save(4)
    assert directories(now.store) == names(4, attempt_id=attempt_id), (
        "its retention is the run's now"
    )


def test_a_file_that_was_only_touched_is_no_damage(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    info = one.save(0)
    file = Path(info.path, "model-0")
    file.write_text(file.read_text())
    assert one.manager.newest_intact() == info


def test_what_a_storage_cannot_tell_is_read_again_on_distrust() -> None:
    """Of an object no more than the size is looked at, as long as nothing went wrong."""
    location = Location.of(f"memory://{uuid.uuid4()}", retry_s=0)
    one = Kept(location)
    first, second = one.save(0), one.save(1)
    storage = location.open()
    [model] = [path for path in storage.list("") if path.startswith(f"checkpoints/{names(1)[0]}/m")]
    storage.write(model, b"9 of 9")
    one.manager.distrust()
    assert one.manager.newest_intact() == first
    assert [info.path for info in one.manager.best()] == [first.path]
    assert second.path.startswith("memory://")


def test_more_ranks_than_before_need_not_write_where_one_wrote(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    one.manager.merges_files = True
    one.manager.launched(1)
    one.save(0)
    assert one.manager.launched(2) == {0}
    every = Kept(tmp_path / "every")
    every.manager.merges_files = True
    for rank in (1, 0):
        every.manager.expect(rank, 0)
    assert every.take(every.part(0)) is None
    assert every.take(every.part(0, rank=1)) is not None
    assert every.manager.launched(3) == {0, 1, 2}, "all ranks wrote, so all will"


def rolled_back(kept: Kept, *, good_step: int) -> None:
    """Training has diverged in the attempt that `kept` commits for."""
    found = Rollback(
        attempt=kept.attempt_id.attempt,
        rank=1,
        step=good_step + 1,
        good_step=good_step,
        reason="loss is nan",
        skipped={"train": ((0, 8, 16),)},
    )
    kept.manager.divergences.take(kept.attempt_id.token, found)
    kept.manager.leave_bad_out()


def test_checkpoints_after_the_last_good_report_are_left_out_and_deleted(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for number in (1, 2, 3):
        kept.take(kept.part(number, loss=-number))
    rolled_back(kept, good_step=25)
    start = kept.manager.start()
    assert (start.step, start.skipped) == (20, {"train": ((0, 8, 16),)})
    assert [each.step for each in kept.manager.best()] == [20, 10]
    # A replay's restart leaves out what its run has left out.
    again = Kept(tmp_path / "again")
    again.manager.origin = StartingPoint(skipped=start.skipped)
    again.take(again.part(1))
    assert (again.manager.start().step, again.manager.start().skipped) == (10, start.skipped)
    # They go once there is a newer one, also those that another driver finds.
    other = Kept(tmp_path, attempt_id=AttemptId(token=2, attempt=0))
    other.manager.divergences = kept.manager.divergences
    other.manager.take_over(other.store.find(since_token=0))
    assert other.manager.start().step == 20
    other.take(other.part(5))
    assert [each.step for each in other.manager.best()] == [50, 20, 10]
    assert len(directories(other.store)) == 3


def test_a_commit_that_comes_after_the_divergence_is_known_as_bad(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    rolled_back(kept, good_step=5)
    kept.manager.add(kept.part(1))
    manifest = kept.manager.next_complete()
    assert manifest is not None
    assert not is_good(manifest, kept.manager.divergences)


def test_the_checkpoint_before_the_newest_is_spared_while_it_may_be_needed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, num_to_keep=1)
    kept.manager.spares_previous = True
    for number in (1, 2, 3):
        kept.take(kept.part(number))
    rolled_back(kept, good_step=25)
    assert kept.manager.start().step == 20
