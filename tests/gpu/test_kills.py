"""A killed worker process leaves no memory on the GPU; the next one is quick, and clean."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer
from polytrain.linux.machine_resources import visible_gpus
from polytrain.linux.nvidia_gpus import opened_gpus

pytestmark = pytest.mark.alone  # they measure time, and the memory of the GPU

GIB = 1 << 30
KILLS, HELD = 50, 8 * GIB
REPETITIONS = 3

_LOOK_S = 0.005

NEW_PROCESS = """
import sys
import time
began = time.monotonic()
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
torch.optim.AdamW(model.parameters())
imported = time.monotonic() - began
device = torch.device("cuda")
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters())
held = torch.load(sys.argv[1], map_location=device, weights_only=True)
model.load_state_dict(held["model"])
optimizer.load_state_dict(held["optimizer"])
model(torch.ones(32, 1024, device=device)).square().mean().backward()
optimizer.step()
torch.cuda.synchronize()
print(imported, time.monotonic())
"""
"""What no restart can leave out: a process, a CUDA context, the checkpoint, and a step."""


def fit(path: Path, train: Callable[[dict[str, Any]], None], **config: Any) -> Result:
    return make_trainer(
        "torch",
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True, cluster="local"),
        run_config=RunConfig(
            storage_path=path,
            name="run",
            progress=False,
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()


def hold_memory(config: dict[str, Any]) -> None:
    """Hold some memory, and die, in all attempts but the last."""
    from polytrain import get_context, report
    from polytrain.torch import get_device

    notes, attempt = Path(config["notes"]), get_context().get_attempt()

    def devices_of(pid: int) -> list[str]:
        opened = []
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened.append(os.readlink(file))
        return [name for name in opened if name.startswith("/dev/nvidia")]

    note = {"parent": os.getppid(), "opened_by_parent": devices_of(os.getppid())}
    import torch

    # Written, so that the memory is really there.
    memory = torch.ones(config["held"], dtype=torch.uint8, device=get_device())
    report({"attempt": attempt, "sum": int(memory[:8].sum())})
    note |= {"opened": devices_of(os.getpid()), "ends_at": time.monotonic()}
    (notes / str(attempt)).write_text(json.dumps(note))
    if attempt < config["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    notes: list[Mapping[str, Any]]
    """What each attempt has noted."""

    used: list[tuple[float, int]]
    """Monotonic times, and the bytes of the GPU's memory that were in use."""

    def free_after(self, kill: int) -> float:
        """Return the seconds from a kill until the process' memory was seen to be free."""
        at, most = self.notes[kill]["ends_at"], self.used[0][1] + HELD // 2
        return next(time for time, used in self.used if time > at and used < most) - at


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    path = tmp_path_factory.mktemp("kills")
    with watched_memory() as used:
        fit(path, hold_memory, notes=str(path), kills=KILLS, held=HELD)
    notes = [json.loads((path / str(number)).read_text()) for number in range(KILLS + 1)]
    return Kills(notes=notes, used=used)


@contextmanager
def watched_memory() -> Iterator[list[tuple[float, int]]]:
    """Read the memory in use every few milliseconds, from the driver, outside of the run."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py: pip install '.[gpu-metrics]'")
    used: list[tuple[float, int]] = []
    has_ended = Event()

    def watch() -> None:
        with opened_gpus(visible_gpus(os.environ)[:1], by_place=True) as read:
            while not has_ended.wait(_LOOK_S):
                [gpu] = read()
                assert gpu.memory is not None
                used.append((time.monotonic(), gpu.memory))

    watching = Thread(target=watch)
    watching.start()
    try:
        yield used
    finally:
        has_ended.set()
        watching.join()


def test_memory_is_free_a_second_after_a_kill(
    kills: Kills, figure: Callable[[str, str], None]
) -> None:
    free = [kills.free_after(number) for number in range(KILLS)]
    figure(
        f"{HELD / GIB:g} GiB of a killed process are free",
        f"after {statistics.median(free):.3f} s ({min(free):.3f} to {max(free):.3f}), "
        f"within 1 s {sum(each <= 1 for each in free)} of {KILLS} times",
    )
    held = [number for number, each in enumerate(free) if each > 1]
    assert not held
    most = kills.used[0][1] + HELD
    assert any(used >= most for _, used in kills.used), "no process held the memory"


def test_no_process_that_forks_opens_the_gpu(kills: Kills) -> None:
    assert all(each["opened"] for each in kills.notes)
    assert [each["opened_by_parent"] for each in kills.notes] == [[]] * len(kills.notes)


def step_and_die(config: dict[str, Any]) -> None:
    import torch

    from polytrain import get_context
    from polytrain.torch import TrainingState, get_device, prepare_model

    attempt, notes = get_context().get_attempt(), Path(config["notes"])
    model = prepare_model(
        torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    state.restore()
    for step in range(2):
        model(torch.ones(32, 1024, device=get_device())).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        if step == 0 and attempt > 0:
            (notes / f"stepped-{attempt}").write_text(str(time.monotonic()))
        state.report({"step": step})
    if attempt < config["kills"]:
        # Kills while a checkpoint is stored are others' to test.
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, notes / "saved.pt")
        (notes / f"killed-{attempt}").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_restart_is_quicker_than_a_new_process(
    tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    fit(tmp_path, step_and_die, notes=str(tmp_path), kills=REPETITIONS)

    def at(name: str) -> float:
        return float((tmp_path / name).read_text())

    ours = [at(f"stepped-{number + 1}") - at(f"killed-{number}") for number in range(REPETITIONS)]
    new, imports = zip(
        *(new_process(tmp_path / "saved.pt") for _ in range(REPETITIONS)), strict=True
    )
    figure("SIGKILL to the first step, NCCL", spread(ours))
    figure(
        "a new process, CUDA, the checkpoint and a step, without a group",
        f"{spread(new)}, of which {statistics.median(imports):.2f} s are the import of torch",
    )
    assert statistics.median(ours) < statistics.median(new)


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def new_process(saved: Path) -> tuple[float, float]:
    """Return the seconds from the start of a process to the end of its step, and of its imports."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, str(saved)], check=True, capture_output=True, text=True
    ).stdout
    imported, stepped = map(float, ended.split())
    return stepped - began, imported
