"""A trainer that the kernel ends for want of memory: told as such, and its run goes on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.journals import journal

import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

LIMIT = 64 << 20
LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
"""Of the first version of control groups, and of the second."""


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group whose processes have 64 MB together."""
    for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        group = Path(root, f"polytrain-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        limit = next((group / name for name in LIMIT_FILES if (group / name).exists()), None)
        try:
            if limit is not None:
                limit.write_text(str(LIMIT))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no control group with a limit of memory can be made here: that takes root")


def test_a_trainer_that_the_kernel_ends_for_want_of_memory_is_reported_as_such(
    quiet: RunConfig, little_memory: Path
) -> None:
    result = make_trainer(
        "reference",
        too_much,
        train_loop_config={"group": str(little_memory)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert (result.restarts, result.metrics) == (1, {"step": 2})
    [ended] = journal(result.path, "AttemptEnded")
    assert (ended["failure"]["kind"], ended["failure"]["rank"]) == ("OUT_OF_MEMORY", 1)


def too_much(config: dict[str, Any]) -> None:
    """In the first attempt, rank 1 fills more memory than there is."""
    context = polytrain.get_context()
    polytrain.report({"step": 1})
    if (context.get_attempt(), context.get_world_rank()) == (0, 1):
        Path(config["group"], "cgroup.procs").write_text(str(os.getpid()))
        filled = bytearray()
        while True:
            filled += b"x" * (1 << 20)
    polytrain.report({"step": 2})
