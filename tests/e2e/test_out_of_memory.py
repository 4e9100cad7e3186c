"""A trainer that the kernel ends for want of memory: told as such, and its run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.journals import journal

from polytrain.testing.processes import eventually

LIMIT = 768 << 20
LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
"""Of the first version of control groups, and of the second."""


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group whose processes have 768 MB together."""
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


PROGRAM = """
import os, sys
from pathlib import Path

group, storage = sys.argv[1:]
Path(group, "cgroup.procs").write_text(str(os.getpid()))

import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

def too_much():
    context = polytrain.get_context()
    polytrain.report({"step": 1})
    if (context.get_attempt(), context.get_world_rank()) == (0, 1):
        filled = bytearray()
        while True:
            filled += b"x" * (1 << 20)
    polytrain.report({"step": 2})

result = make_trainer(
    "reference",
    too_much,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="run",
        storage_path=storage,
        progress=False,
        failure_config=FailureConfig(max_failures=1),
    ),
).fit()
assert (result.restarts, result.metrics) == (1, {"step": 2})
"""
"""In the first attempt, rank 1 fills more memory than there is."""


def test_a_trainer_that_the_kernel_ends_for_want_of_memory_is_reported_as_such(
    tmp_path: Path, little_memory: Path
) -> None:
    """As in a container: the driver has the same limit."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(little_memory), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    [ended] = journal(tmp_path / "run", "AttemptEnded")
    assert (ended["failure"]["kind"], ended["failure"]["rank"]) == ("OUT_OF_MEMORY", 1)
    # Its zygote ends with it, which takes a moment.
    assert eventually(lambda: not Path(little_memory, "cgroup.procs").read_text())
