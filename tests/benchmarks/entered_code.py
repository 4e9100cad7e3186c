"""Which of our files and functions the driver enters: until a report, a commit, and a restart.

It profiles the driver of a run on this machine that is killed once, and divides the calls by the
times of the run's own journal. The fewer files, the less a reader must know to follow the run.
Importing a module, or making a class, is no step of the run: only functions count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import polytrain
from polytrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, make_trainer

_ROOT = str(Path(polytrain.__file__).parent)
_KILLED_AT = 3

Call = tuple[float, CodeType]


def train(config: dict[str, Any]) -> None:
    """Report with checkpoints; rank 0 is killed once."""
    directory = config["directory"]
    killed = Path(directory, "killed")
    for step in range(6):
        checkpoint = None
        if polytrain.get_context().get_world_rank() == 0:
            files = Path(directory, f"step {step}")
            files.mkdir(exist_ok=True)
            (files / "model").write_text(str(step))
            checkpoint = polytrain.Checkpoint.from_directory(files)
        polytrain.report({"step": step}, checkpoint=checkpoint, upload="sync")
        is_due = config["is_killed"] and step == _KILLED_AT and not killed.exists()
        if is_due and checkpoint is not None:
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def killed_once(backend: str, directory: Path, scaling: ScalingConfig) -> None:
    """Make a run whose rank 0 is killed once, unless it is inline."""
    make_trainer(
        backend,
        train,
        train_loop_config={"directory": str(directory), "is_killed": scaling.num_workers != 0},
        scaling_config=scaling,
        run_config=RunConfig(
            storage_path=directory,
            name="run",
            progress=False,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(written_by="rank_0"),
        ),
    ).fit()


@contextlib.contextmanager
def profiled() -> Iterator[list[Call]]:
    """Yield the calls of our functions by this thread and those that it starts, with their time."""
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_NEWLOCALS
        if event == "call" and is_function and code.co_filename.startswith(_ROOT):
            calls.append((time.time(), code))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def phases(run: Path, *, begun: float, killed: float) -> dict[str, tuple[float, float]]:
    """Return each phase's begin and end, in seconds since the epoch, by the run's journal."""
    entries = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]

    def first(event: str, *, after: float) -> float:
        times = (each["time"] for each in entries if each["event"] == event)
        return next(time for time in times if time > after)

    reported = first("Reported", after=begun)
    return {
        "make_trainer to the first report": (begun, reported),
        "report to commit": (reported, first("Committed", after=reported)),
        "SIGKILL to the next attempt": (killed, first("Launched", after=killed)),
    }


def main() -> None:
    """Print the numbers of files and functions, and with --files the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="reference", help="default: %(default)s")
    parser.add_argument("--files", action="store_true", help="also list the files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        with profiled() as calls:
            begun = time.time()
            killed_once(
                arguments.backend, Path(directory), ScalingConfig(num_workers=2, cluster="local")
            )
        killed = float(Path(directory, "killed").read_text())
        times = phases(Path(directory, "run"), begun=begun, killed=killed)
    for name, (begin, end) in times.items():
        show(name, [code for at, code in calls if begin <= at <= end], files=arguments.files)


def show(name: str, entered: Sequence[CodeType], *, files: bool) -> None:
    """Print what was entered in one phase."""
    functions = set(entered)
    by_file = collections.Counter(code.co_filename for code in functions)
    print(f"{name}: {len(by_file)} files, {len(functions)} functions")
    if files:
        for path, count in sorted(by_file.items()):
            print(f"  {path.removeprefix(_ROOT + '/'):50} {count:3}")


if __name__ == "__main__":
    main()
