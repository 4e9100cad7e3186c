"""What a library has saved, as this rank's part of a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from polytrain import Checkpoint, get_context
from polytrain.extension import scratch_directory
from polytrain_torch.collecting import gathered

_NAMED = 3
"""Files that an error names."""


@contextmanager
def part_of(saved: Path, *, name: str = "") -> Iterator[Path | None]:
    """A directory with this rank's part of what all ranks have saved; None if it has none.

    Where every rank writes checkpoints, each file is in the part of the first rank that sees it.
    Otherwise all of it is rank 0's. All ranks call this.

    Args:
        saved: a file, or a directory. On the ranks of a node it is the same one.
        name: what it is called in the checkpoint; "" for the files of a directory as they are.

    Raises:
        FileNotFoundError: if no rank sees any file.
        RuntimeError: if rank 0 is to write what it doesn't see.
    """
    everybodys = _everybodys_files(saved)
    rank = dist.get_rank()
    writes = rank == 0 or get_context().every_rank_writes()
    _refuse_what_is_nowhere(everybodys, saved)
    if not get_context().every_rank_writes():
        _refuse_what_is_elsewhere(everybodys)
    if not writes:
        yield None
        return
    # Not beside it: report doesn't return if this process is to end, and nobody would tidy up.
    with tempfile.TemporaryDirectory(dir=scratch_directory(), prefix="part-") as directory:
        part = Path(directory)
        for file in everybodys[rank].difference(*everybodys[:rank]):
            (part / name / file).parent.mkdir(parents=True, exist_ok=True)
            # Hard links don't go from one file system to another; report follows these.
            (part / name / file).symlink_to(saved.resolve() / file)
        yield part


@contextmanager
def directory_of_all() -> Iterator[Path]:
    """An empty directory that the ranks of a node share. All ranks call this.

    It is gone when all ranks have left. What an exception leaves, the next call or the end of the
    attempt removes: other ranks may be in it, and their errors would be told in place of the cause.
    """
    context = get_context()
    own: Path | None = None
    if context.get_local_rank() == 0:
        own = scratch_directory() / "of-all"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
    by_rank = gathered((context.get_node_rank(), own))
    [directory] = [path for node, path in by_rank if path and node == context.get_node_rank()]
    yield directory
    # Others may still read in it, or write.
    dist.barrier()
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)


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


def _refuse_what_is_nowhere(everybodys: Sequence[AbstractSet[str]], saved: Path) -> None:
    if not any(everybodys):
        raise FileNotFoundError(
            f"There is no file in {saved}, where this checkpoint was to have been saved. Have it "
            "saved in a directory of the worker's own node; addresses such as s3:// are for "
            "RunConfig(storage_path=…), which takes the run's checkpoints there."
        )


def _refuse_what_is_elsewhere(everybodys: Sequence[AbstractSet[str]]) -> None:
    elsewhere = sorted(set().union(*everybodys) - everybodys[0])
    if elsewhere:
        more = len(elsewhere) - _NAMED
        named = ", ".join(elsewhere[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise RuntimeError(
            f"{named}: rank 0 writes the checkpoints, and doesn't see what ranks of other nodes "
            "have saved there. Have every rank write its own: "
            'RunConfig(checkpoint_config=CheckpointConfig(written_by="every_rank")).'
        )
