"""Makes a library's saved files this rank's part of a checkpoint."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polytrain import Checkpoint, ValidationTaskConfig, get_context, report
from polytrain.extension import scratch_directory
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.gathering import gathered

_NAMED = 3
"""Maximum number of files that an error names."""


@contextmanager
def part_of(saved: Path, *, name: str = "") -> Iterator[Path | None]:
    """Yield a directory with this rank's part of the saved files, or None if it has none.

    If every rank writes checkpoints, each file is in the part of the first rank that sees it.
    Otherwise all files are in rank 0's part. All ranks call this.

    Args:
        saved: a file or a directory, the same one on all ranks of a node.
        name: its name in the checkpoint; "" keeps the names of a directory's files.

    Raises:
        FileNotFoundError: if no rank sees any file.
        RuntimeError: if rank 0 has to write a file that it doesn't see.
    """
    agree_on_call("saving a checkpoint")
    files_by_rank = _files_by_rank(saved)
    rank = dist.get_rank()
    writes = rank == 0 or get_context().every_rank_writes()
    _raise_if_none(files_by_rank, saved)
    if not get_context().every_rank_writes():
        _raise_if_elsewhere(files_by_rank)
    if not writes:
        yield None
        return
    # Not beside `saved`: report may end this process, and the directory would stay.
    with tempfile.TemporaryDirectory(dir=scratch_directory(), prefix="part-") as directory:
        part = Path(directory)
        for file in files_by_rank[rank].difference(*files_by_rank[:rank]):
            (part / name / file).parent.mkdir(parents=True, exist_ok=True)
            # Hard links can't cross file systems; report follows symbolic links.
            (part / name / file).symlink_to(saved.resolve() / file)
        yield part


@contextmanager
def directory_of_all() -> Iterator[Path]:
    """Yield an empty directory that the ranks of a node share. All ranks call this.

    It is removed when all ranks have left the block. After an exception it stays until the next
    call or the end of the attempt: other ranks may still use it, and would fail without it.
    """
    agree_on_call("saving or loading a checkpoint")
    context = get_context()
    own: Path | None = None
    if context.get_local_rank() == 0:
        own = scratch_directory() / "of-all"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
    by_rank = gathered((context.get_node_rank(), own))
    [directory] = [path for node, path in by_rank if path and node == context.get_node_rank()]
    yield directory
    # Other ranks may still use it.
    dist.barrier()
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)


def checkpoint_of(part: Path | None) -> Checkpoint | None:
    """Return a rank's part as a `Checkpoint`; None if it has none."""
    return None if part is None else Checkpoint.from_directory(str(part))


def report_part(
    metrics: Mapping[str, Any],
    part: Path | None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report this rank's part of a checkpoint; a rank that has none requests no validation."""
    report(metrics, checkpoint_of(part), validation=validation if part is not None else False)


def refuse_options(progress: Mapping[str, Any]) -> None:
    """Raise an error if an option of `polytrain.report` would be kept as progress.

    Raises:
        TypeError: there is one.
    """
    for name in inspect.signature(report).parameters.keys() & progress.keys():
        raise TypeError(
            f"{name}= is an option of polytrain.report, which this report doesn't take. Leave it "
            "out: CheckpointConfig has options for all checkpoints of a run. Give progress of that "
            "name another one."
        )


def copy_whole(saved: Path, target: Path) -> Path:
    """Copy a file or a directory, which nobody sees before it is whole; return the target.

    What is there already is replaced: it is another run's, or comes from another node, on a shared
    disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".copied-") as temporary:
        copied = Path(temporary, target.name)
        if saved.is_dir():
            shutil.copytree(saved, copied)
            shutil.rmtree(target, ignore_errors=True)
        else:
            shutil.copyfile(saved, copied)
        copied.rename(target)
    return target


def _files_by_rank(saved: Path) -> list[set[str]]:
    """List by rank the files that it sees. Each node's first rank counts for the node."""
    # Wait until all ranks have written their files.
    dist.barrier()
    files: set[str] = set()
    if get_context().get_local_rank() == 0:
        found = [saved] if saved.is_file() else saved.rglob("*")
        files = {str(each.relative_to(saved)) for each in found if each.is_file()}
    return gathered(files)


def _raise_if_none(files_by_rank: Sequence[AbstractSet[str]], saved: Path) -> None:
    if not any(files_by_rank):
        raise FileNotFoundError(
            f"There is no file in {saved}, where the library should have saved this checkpoint. "
            "Have it saved in a directory of the worker's own node. Addresses such as s3:// belong "
            "into RunConfig(storage_path=…), where polytrain stores the run's checkpoints."
        )


def _raise_if_elsewhere(files_by_rank: Sequence[AbstractSet[str]]) -> None:
    elsewhere = sorted(set().union(*files_by_rank) - files_by_rank[0])
    if elsewhere:
        more = len(elsewhere) - _NAMED
        named = ", ".join(elsewhere[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise RuntimeError(
            f"{named}: rank 0 writes the checkpoints, and can't see these files, which ranks of "
            "other nodes have saved. Have every rank write its own: "
            'RunConfig(checkpoint_config=CheckpointConfig(written_by="every_rank")).'
        )
