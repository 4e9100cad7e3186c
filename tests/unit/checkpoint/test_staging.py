"""Where a trainer puts the files of a checkpoint: where they can be moved from, if anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from polytrain.checkpoint.staging import Stagings, link, remove


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another file system."""
    with TemporaryDirectory(dir="/dev/shm", prefix="polytrain-test-") as path:
        yield Path(path)


def made(path: Path) -> Path:
    path.mkdir()
    return path


def test_files_of_the_storages_file_system_are_staged_there(
    tmp_path: Path, elsewhere: Path
) -> None:
    stagings = Stagings(scratch=elsewhere, near=tmp_path / "run" / "staging")
    staging = stagings.new("checkpoint", 0, source=made(tmp_path / "source"))
    assert staging.is_relative_to(tmp_path / "run" / "staging")


def test_files_of_another_file_system_are_staged_on_the_node(
    tmp_path: Path, elsewhere: Path
) -> None:
    """They have to be copied to the storage anyway: not while the trainer waits."""
    stagings = Stagings(scratch=elsewhere, near=tmp_path / "staging")
    staging = stagings.new("checkpoint", 0, source=made(elsewhere / "source"))
    assert staging.is_relative_to(elsewhere)


def test_links_are_staged_where_what_they_lead_to_is(tmp_path: Path, elsewhere: Path) -> None:
    """Its largest file decides: small ones are copied anyway."""
    source = made(elsewhere / "source")
    (source / "small").write_text("1")
    (tmp_path / "large").write_text("12")
    (source / "large").symlink_to(tmp_path / "large")
    stagings = Stagings(scratch=elsewhere, near=tmp_path / "staging")
    assert stagings.new("checkpoint", 0, source=source).is_relative_to(tmp_path / "staging")


def test_without_a_directory_as_storage_files_are_staged_on_the_node(
    tmp_path: Path, elsewhere: Path
) -> None:
    stagings = Stagings(scratch=tmp_path / "scratch", near=None)
    for source in (None, made(tmp_path / "source"), elsewhere):
        assert stagings.new("checkpoint", 0, source=source).is_relative_to(tmp_path / "scratch")


@pytest.mark.parametrize("same", [True, False])
def test_files_that_are_still_to_be_written_are_written_where_they_can_be_moved_from(
    tmp_path: Path, elsewhere: Path, same: bool
) -> None:
    scratch, near = made(tmp_path / "scratch"), (tmp_path if same else elsewhere) / "staging"
    staging = Stagings(scratch=scratch, near=near).new("checkpoint", 0)
    assert staging.is_relative_to(near if same else scratch)


def test_files_are_moved_out_of_the_scratch_directory_while_a_rank_asks_for_its_next(
    tmp_path: Path, elsewhere: Path
) -> None:
    """As an agent does where the storage is on another file system: each may be gone any moment."""
    scratch = made(elsewhere / "scratch")
    # Listed, and gone when it is asked for.
    (scratch / "moved").symlink_to(scratch / "nowhere")
    stagings = Stagings(scratch=scratch, near=tmp_path / "staging")
    assert stagings.new("checkpoint", 0).is_relative_to(scratch)


def test_a_file_that_a_library_removes_meanwhile_decides_nothing(
    tmp_path: Path, elsewhere: Path
) -> None:
    source = made(tmp_path / "source")
    (source / "temporary").symlink_to(source / "nowhere")
    stagings = Stagings(scratch=elsewhere, near=tmp_path / "staging")
    assert stagings.new("checkpoint", 0, source=source).is_relative_to(tmp_path / "staging")


def test_staging_is_empty_whatever_a_report_that_raised_has_left(tmp_path: Path) -> None:
    stagings = Stagings(scratch=tmp_path, near=None)
    left = stagings.new("checkpoint", 0)
    (left / "half").write_text("written")
    (left / "deep").mkdir()
    assert list(stagings.new("checkpoint", 0).iterdir()) == []


def test_each_rank_and_checkpoint_has_a_directory_of_its_own(tmp_path: Path) -> None:
    stagings = Stagings(scratch=tmp_path, near=None)
    all_of_them = {
        stagings.new(name, rank)
        for name in ("checkpoint_000001-1.0", "checkpoint_000001-1.1", "checkpoint_000002-1.1")
        for rank in (0, 1, 10)
    }
    assert len(all_of_them) == 9
    assert all(path.is_dir() for path in all_of_them)


FILES = ("a", "b/c", "b/d", "e")


@pytest.mark.parametrize("deleted", range(len(FILES)))
@pytest.mark.parametrize("linked", range(len(FILES) + 1))
def test_what_another_process_is_deleting_is_linked_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: int, deleted: int
) -> None:
    """The deletion begins after some files were linked, and is slow: some files are left."""
    staged, target = tmp_path / "copies" / "checkpoint-rank_0", tmp_path / "sent" / "mine"
    for file in FILES:
        (staged / file).parent.mkdir(parents=True, exist_ok=True)
        (staged / file).write_text(file)
    link_one, unlink_one = os.link, os.unlink
    links, unlinks = 0, 0

    def unlink_some(*given: object, **options: object) -> None:
        nonlocal unlinks
        if unlinks == deleted:
            raise OSError("slow")
        unlinks += 1
        unlink_one(*given, **options)  # type: ignore[arg-type]

    def delete_slowly() -> None:
        with monkeypatch.context() as slow:
            slow.setattr(os, "unlink", unlink_some)
            remove(staged)

    def link_and_delete(*given: object, **options: object) -> None:
        nonlocal links
        if linked == links == 0:
            delete_slowly()
        links += 1
        link_one(*given, **options)  # type: ignore[arg-type]
        if links == linked:
            delete_slowly()

    monkeypatch.setattr(os, "link", link_and_delete)
    with pytest.raises(FileNotFoundError):
        link(staged, target)
    assert not target.exists()
    assert unlinks == deleted
