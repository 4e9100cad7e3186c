"""What a first attempt had to import the next is forked with, where that makes no difference."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.e2e.driver import run_driver, start_driver
from tests.e2e.test_ends import OURS

from polytrain.testing.processes import eventually

PARTS = 40

LIBRARY = """
import os
with open("imports", "a") as imports:
    print(os.getpid(), file=imports, flush=True)
os.environ["SET_BY_LARGE"] = "yes"
colour = os.environ.get("COLOUR", "grey")
"""

# The first attempt's rank 1 dies when the library has been imported for the next, by a process
# that is ready then, or has found that it can't be used and has ended.
SCRIPT = """
from polytrain.testing.processes import eventually

sys.path.insert(0, os.path.abspath("site-packages"))

def importers():
    with open("imports") as imports:
        return [int(line) for line in imports]

def is_settled(pid):
    import psutil
    try:
        process = psutil.Process(pid)
        # One that is ready waits for requests.
        return process.status() == psutil.STATUS_ZOMBIE or any(
            os.readlink(file) == "anon_inode:[eventpoll]"
            for file in Path(f"/proc/{pid}/fd").iterdir()
        )
    except psutil.NoSuchProcess:
        return True
    except FileNotFoundError:
        # It is closing what it doesn't need, or ending.
        return False

def train():
    context = polytrain.get_context()
    attempt, rank = context.get_attempt(), context.get_world_rank()
    had = "large" in sys.modules
    BEFORE
    import large
    print("attempt", attempt, "had it:", had, large.colour, os.environ["SET_BY_LARGE"])
    polytrain.report({"attempt": attempt})
    polytrain.collective.barrier()
    if attempt == 0:
        if rank == 1:
            assert eventually(lambda: len(importers()) == IMPORTERS)
            assert eventually(lambda: is_settled(importers()[-1]))
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    AFTER

result = make_trainer(
    "reference", train, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        storage_path="runs", progress=False, failure_config=FailureConfig(max_failures=2)
    ),
).fit()
print("restarts", result.restarts)

def again():
    polytrain.report({"had": "large" in sys.modules})

second = make_trainer(
    "reference", again, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path="runs", progress=False),
).fit()
print("the second run had it:", second.history[-1]["had"])

def left():
    return [c for c in psutil.Process().children(recursive=True) if ours(c)]

print("only the zygote is kept:", eventually(lambda: len(left()) == 1))
let_go()
print("left", left())
"""


def run(
    directory: Path,
    *,
    at_import: str = "",
    before: str = "pass",
    after: str = "pass",
    importers: int = 3,
) -> str:
    """What a run writes whose function imports a large library that is installed.

    Args:
        importers: processes that have imported it before a rank dies: both ranks', and one or two
            for the next attempt.
    """
    package = directory / "site-packages" / "large"
    package.mkdir(parents=True)
    parts = [f"part_{number}" for number in range(PARTS)]
    for part in parts:
        (package / f"{part}.py").touch()
    (package / "__init__.py").write_text(
        f"from large import {', '.join(parts)}{LIBRARY}{at_import}"
    )
    script = SCRIPT.replace("BEFORE", before).replace("AFTER", after)
    script = script.replace("IMPORTERS", str(importers))
    code, output, errors = run_driver(directory, OURS + script)
    assert code == 0, errors
    # The zygote is kept for another run, and what has been imported for this one isn't.
    assert "the second run had it: False" in output
    assert "only the zygote is kept: True" in output
    assert "left []" in output
    return output


def test_what_was_imported_is_there_from_the_next_attempts_first_line(tmp_path: Path) -> None:
    output = run(tmp_path)
    assert "restarts 1" in output
    for rank in range(2):
        assert f"(rank {rank}) attempt 0 had it: False grey yes" in output
        assert f"(rank {rank}) attempt 1 had it: True grey yes" in output


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


# That another library starts one is tested each time.
@pytest.mark.sweep
@pytest.mark.only_in_sweep
def test_what_starts_a_thread_is_imported_again(tmp_path: Path) -> None:
    output = run(tmp_path, at_import=THREAD)
    for rank in range(2):
        assert f"(rank {rank}) attempt 1 had it: False grey yes" in output


def test_a_library_is_there_although_another_starts_a_thread(tmp_path: Path) -> None:
    other = tmp_path / "site-packages" / "starter.py"
    other.parent.mkdir()
    other.write_text(THREAD)
    before = "print('starter', 'starter' in sys.modules)\n    import starter"
    output = run(tmp_path, before=before, importers=4)
    for rank in range(2):
        assert f"(rank {rank}) attempt 1 had it: True grey yes" in output
    assert "starter False" in output
    assert "starter True" not in output


def test_what_depends_on_the_functions_own_variables_is_imported_again(tmp_path: Path) -> None:
    output = run(tmp_path, before="os.environ['COLOUR'] = 'red'")
    for rank in range(2):
        assert f"(rank {rank}) attempt 1 had it: False red yes" in output


def test_without_the_process_that_has_learned_the_run_goes_on(tmp_path: Path) -> None:
    kill = "rank or os.kill(os.getppid(), signal.SIGKILL)"
    output = run(tmp_path, after=f"if attempt == 1: {kill}; signal.pause()")
    assert "restarts 2" in output
    for rank in range(2):
        assert f"(rank {rank}) attempt 2 had it: False grey yes" in output


HELD_UP = """
from pathlib import Path
from polytrain.testing.processes import eventually

def train():
    attempt = polytrain.get_context().get_attempt()
    polytrain.report({"attempt": attempt})
    if attempt == 0:
        Path("trains").touch()
        assert eventually(Path("squatted").exists, seconds=60)
        os.kill(os.getpid(), signal.SIGKILL)

result = make_trainer(
    "reference", train, scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(
        storage_path="runs", progress=False, failure_config=FailureConfig(max_failures=2)
    ),
).fit()
print("restarts", result.restarts)
"""


def squat(stack: ExitStack) -> None:
    """Take every address that can be made from those in use, and never accept a connection."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        address = line.split()[-1]
        if address.startswith("@polytrain-"):
            squatter = stack.enter_context(socket.socket(socket.AF_UNIX))
            with suppress(OSError):
                squatter.bind(f"\0{address[1:]}-preloaded")
                squatter.listen(0)
                with suppress(BlockingIOError):
                    while True:
                        client = stack.enter_context(socket.socket(socket.AF_UNIX))
                        client.setblocking(False)
                        client.connect(squatter.getsockname())


def test_nobody_holds_a_run_up_at_an_address_like_those_it_has(tmp_path: Path) -> None:
    """All users of a machine see abstract addresses, and can take any that are free."""
    driver = start_driver(tmp_path, HELD_UP)
    try:
        assert eventually((tmp_path / "trains").exists, seconds=60)
        with ExitStack() as stack:
            squat(stack)
            (tmp_path / "squatted").touch()
            output, errors = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == 0, errors
    assert "restarts 1" in output
