"""Files of ranks other than 0 that a run which keeps rank 0's alone would lose."""

from __future__ import annotations

from polytrain.checkpoint.rank_files import RankFiles


def test_files_that_rank_0_has_too_are_not_lost() -> None:
    ranks = RankFiles()
    assert ranks.kept(1, ["model", "extra"]) is None
    assert ranks.ignored(1, 1, ["model"]) is None
    assert ranks.ignored(2, 1, ["model"]) is None
    assert ranks.kept(2, ["model"]) is None


def test_a_file_that_only_another_rank_has_is_named_whoever_reports_first() -> None:
    first, second = RankFiles(), RankFiles()
    assert first.kept(3, ["shard-0"]) is None
    told = first.ignored(3, 1, ["shard-1"])
    assert told is not None
    assert "rank 1 reported the file 'shard-1'," in told
    assert "written_by='every_rank'" in told
    assert second.ignored(3, 1, ["shard-1"]) is None
    assert second.kept(3, ["shard-0"]) == told


def test_reports_of_different_steps_are_not_compared() -> None:
    ranks = RankFiles()
    assert ranks.kept(1, ["epoch-1"]) is None
    assert ranks.ignored(2, 1, ["epoch-2"]) is None
    assert ranks.kept(2, ["epoch-2"]) is None


def test_a_rank_whose_reports_have_no_counterpart_costs_no_memory() -> None:
    ranks = RankFiles()
    for step in range(10_000):
        assert ranks.ignored(step, 1, ["model"]) is None
        assert ranks.kept(step + 20_000, ["model"]) is None
    assert len(ranks._ignored) + len(ranks._kept) < 1000
