"""What libraries have saved, as ranks' parts of a checkpoint: in worlds of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest

from polytrain.testing.local_world import WorldRecord, run_world
from polytrain_torch import Torch

DATA = pa.table({"x": [0.0] * 4})


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another file system."""
    with TemporaryDirectory(dir="/dev/shm", prefix="polytrain-test-") as path:
        yield Path(path)


def run(path: Path, function: Callable[..., None], **config: Any) -> WorldRecord:
    return run_world(
        Torch(), data=DATA, path=path, training_function=function, training_config=config
    )


def stays_longer(config: dict[str, Any]) -> None:
    import time

    import torch.distributed as dist

    import polytrain
    from polytrain_torch.checkpoints.parts import directory_of_all

    with directory_of_all() as directory:
        (directory / str(dist.get_rank())).touch()
        deadline = time.monotonic() + 1
        while dist.get_rank() == 1 and directory.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        stayed = directory.exists()
    dist.barrier()
    polytrain.report({"stayed": stayed, "left": directory.exists()})


def test_a_directory_of_all_stays_until_all_have_left_it(tmp_path: Path) -> None:
    for rank in run(tmp_path, stays_longer).ranks:
        assert rank.failure is None
        assert dict(rank.reports[-1].metrics) == {"stayed": True, "left": False}


def reports_what_all_have_saved(config: dict[str, Any]) -> None:
    import os
    import signal
    import tempfile
    from pathlib import Path

    import torch.distributed as dist

    import polytrain
    from polytrain_torch.checkpoints.parts import checkpoint_of, directory_of_all, part_of

    # There isn't any: whatever is not in the session's would not be tidied up after a kill.
    tempfile.tempdir = "/nonexistent"
    rank = dist.get_rank()
    saved = Path(config["saved"])
    (saved / f"of_rank_{rank}").write_text(str(rank))
    with directory_of_all() as directory:
        (directory / f"beside_{rank}").touch()
        with part_of(saved) as part:
            polytrain.report({}, checkpoint_of(part))
            if config["is_killed"]:
                # The first death ends the other process, too.
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_killed", [False, True])
def test_parts_come_from_any_file_system_and_nothing_is_left_beside(
    tmp_path: Path, elsewhere: Path, is_killed: bool
) -> None:
    saved = elsewhere / "output" / "checkpoint-1"
    saved.mkdir(parents=True)
    world = run(tmp_path, reports_what_all_have_saved, saved=str(saved), is_killed=is_killed)
    # Of the ranks of a node, the first has it all.
    assert world.saved(0) == {"of_rank_0": b"0", "of_rank_1": b"1"}
    assert world.saved(1) == {}
    assert [each.name for each in saved.parent.iterdir()] == ["checkpoint-1"]


def saves_at_an_address(config: dict[str, Any]) -> None:
    from pathlib import Path

    import polytrain
    from polytrain_torch.checkpoints.parts import checkpoint_of, part_of

    with part_of(Path("s3://bucket/checkpoint-1")) as part:
        polytrain.report({}, checkpoint_of(part))


def test_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    world = run(tmp_path, saves_at_an_address)
    failures = [rank.failure.failure.message for rank in world.ranks if rank.failure]
    assert failures
    for failure in failures:
        assert "no file in s3:/bucket/checkpoint-1" in failure
        assert "RunConfig(storage_path=…)" in failure


def reports_its_state(config: dict[str, Any]) -> None:
    import tempfile

    import torch

    from polytrain_torch import TrainingState

    tempfile.tempdir = "/nonexistent"
    TrainingState(model=torch.nn.Linear(1, 1)).report({})


def test_states_are_written_where_the_session_tidies_up(tmp_path: Path) -> None:
    world = run(tmp_path, reports_its_state)
    assert [rank.failure for rank in world.ranks] == [None, None]
    assert {"model.pt", "state.pt", "random-0.pt"} <= world.saved(0).keys()
