"""What a library has saved, as this rank's part of a checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from polytrain import Checkpoint, get_context
from polytrain_torch.collecting import gathered


@contextmanager
def part_of(saved: Path, *, name: str = "") -> Iterator[Path | None]:
    """A directory with this rank's part of what all ranks have saved; None if it has none.

    Where every rank writes checkpoints, each file is in the part of the first rank that sees it.
    Otherwise all of it is rank 0's.

    Args:
        saved: a file, or a directory. On the ranks of a node it is the same one.
        name: what it is called in the checkpoint; "" for the files of a directory as they are.
    """
    everybodys = _everybodys_files(saved)
    rank = dist.get_rank()
    if rank != 0 and not get_context().every_rank_writes():
        yield None
        return
    # Beside it, for links don't go from one file system to another.
    with tempfile.TemporaryDirectory(dir=saved.parent, prefix=".part-") as directory:
        part = Path(directory)
        for file in everybodys[rank].difference(*everybodys[:rank]):
            (part / name / file).parent.mkdir(parents=True, exist_ok=True)
            os.link(saved / file, part / name / file)
        yield part


@contextmanager
def directory_of_all() -> Iterator[Path]:
    """An empty directory that the ranks of a node share. All ranks call this."""
    name = [tempfile.mkdtemp(prefix="polytrain-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    assert name[0] is not None
    # Below it, so that what is beside the directory is gone with it.
    directory = Path(name[0], "state")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield directory
    finally:
        if get_context().get_local_rank() == 0:
            shutil.rmtree(directory.parent, ignore_errors=True)


def checkpoint_of(part: Path | None) -> Checkpoint | None:
    """A rank's part, if it has one, as `polytrain.report` takes it."""
    return None if part is None else Checkpoint.from_directory(str(part))


def _everybodys_files(saved: Path) -> list[set[str]]:
    """By rank, the files that it sees. Of the ranks of a node, the first sees all."""
    # Until the others have written theirs.
    dist.barrier()
    files: set[str] = set()
    if get_context().get_local_rank() == 0:
        found = [saved] if saved.is_file() else saved.rglob("*")
        files = {str(each.relative_to(saved)) for each in found if each.is_file()}
    return gathered(files)
