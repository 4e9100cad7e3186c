"""Signals of any number, at any time: a run makes its checkpoint, or ends and leaves nothing."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.driver import PREAMBLE, WITH_RAY, start_driver
from tests.sweeps import only_in_sweep

from polytrain import Result
from polytrain.testing.processes import eventually, is_alive

TRAINING = """
import contextlib, tempfile, threading
from pathlib import Path
from polytrain.workers.processes.cache import let_go

def train():
    rank, here = polytrain.get_context().get_world_rank(), Path(DIRECTORY)
    for step in range(1, 1_000_000):
        if (here / "until").exists():
            return
        # It makes a first checkpoint, so that a stop waits for another. It makes that when it is
        # asked for one, and the test wants it.
        wanted = step == 1 or (polytrain.checkpoint_requested() and (here / "go").exists())
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            kept = polytrain.Checkpoint.from_directory(directory) if wanted else None
            polytrain.report({"step": step}, checkpoint=kept)
        if step == 1:
            # What a stop waits for is another checkpoint than this one.
            polytrain.get_all_reported_checkpoints()
            (here / f"trains {rank}").touch()
        time.sleep(0.01)

def fit():
    return make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=2, cluster=CLUSTER),
        run_config=RunConfig(
            storage_path="runs", name="run", progress=False,
            # Ranks hear of a request at different steps.
            checkpoint_config=polytrain.CheckpointConfig(written_by="rank_0"),
        ),
    ).fit()
"""

FIT = """
fit()
Path("deployed").touch()
"""

SWEEP = """
for rate in (0.1, 0.01, 0.001):
    print("rate", rate, flush=True)
    fit()
Path("deployed").touch()
"""

INTERRUPTED = """
before, handler = set(threading.enumerate()), signal.getsignal(NUMBER)

def send():
    while not all(Path(f"trains {rank}").exists() for rank in (0, 1)):
        time.sleep(0.01)
    for pause_s in PAUSES:
        if signal.getsignal(NUMBER) == handler:
            # The run has ended: what comes now is for this script.
            break
        os.kill(os.getpid(), NUMBER)
        time.sleep(pause_s)
    # Signals that come at the same moment may be one, which waits for a checkpoint.
    Path("go").touch()

sender = threading.Thread(target=send)
sender.start()
with contextlib.suppress(KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
    fit()
while sender.is_alive():
    with contextlib.suppress(KeyboardInterrupt):
        sender.join()
let_go()
started = [each for each in threading.enumerate() if each not in before]
for each in started:
    # A thread that is ending may need a moment.
    each.join(10)
print("left:", [each.name for each in started if each.is_alive()], flush=True)
"""


def script(directory: Path, then: str, *, cluster: str = "local") -> str:
    training = TRAINING.replace("DIRECTORY", repr(str(directory)))
    return training.replace("CLUSTER", repr(cluster)) + then


def trains(directory: Path) -> bool:
    return all((directory / f"trains {rank}").exists() for rank in (0, 1))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Drivers, which a failed test leaves running."""
    drivers: list[subprocess.Popen[str]] = []
    yield drivers
    for driver in drivers:
        driver.kill()
        driver.communicate()


@pytest.fixture(autouse=True)
def _not_under_nohup() -> Iterator[None]:
    """Drivers take SIGHUP, also if these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def is_stopped_by(directory: Path, reason: str) -> bool:
    result = Result.from_path(directory / "runs" / "run")
    assert result.stopped is not None
    assert (result.stopped.by, result.stopped.reason) == ("signal", reason)
    assert result.checkpoint is not None
    return int(Path(result.checkpoint.path, "step").read_text()) > 1


def test_a_terminal_that_is_closed_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(PREAMBLE + script(tmp_path, FIT))
    (tmp_path / "go").touch()
    # As for most users, what can't be written stays in Python's buffer.
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(tmp_path)
            os.execve(sys.executable, [sys.executable, str(path)], buffered)
        finally:
            os._exit(127)
    assert eventually(lambda: trains(tmp_path))
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert is_stopped_by(tmp_path, "SIGHUP")
    assert not (tmp_path / "deployed").exists()
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP


@pytest.mark.sweep
@pytest.mark.parametrize("cluster", ["local", only_in_sweep("ray")])
def test_a_shell_that_sends_it_too_does_not_end_the_run_without_a_checkpoint(
    tmp_path: Path, started: list[subprocess.Popen[str]], cluster: str
) -> None:
    """The kernel tells all processes of a closed terminal, and so does the shell."""
    preamble = WITH_RAY if cluster == "ray" else PREAMBLE
    driver = start_driver(tmp_path, script(tmp_path, FIT, cluster=cluster), preamble=preamble)
    started.append(driver)
    assert eventually(lambda: trains(tmp_path))
    driver.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    driver.send_signal(signal.SIGHUP)
    _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 128 + signal.SIGHUP
    assert is_stopped_by(tmp_path, "SIGHUP"), errors


CODES = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143}
"""Python dies of SIGINT after a KeyboardInterrupt, which a shell shows as 130."""


@pytest.mark.parametrize("number", CODES)
def test_a_signal_ends_the_script_after_the_checkpoint(
    tmp_path: Path, started: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    """A sweep doesn't go on to its next run, and nothing is deployed."""
    driver = start_driver(tmp_path, script(tmp_path, SWEEP))
    started.append(driver)
    assert eventually(lambda: trains(tmp_path))
    (tmp_path / "go").touch()
    driver.send_signal(number)
    output, errors = driver.communicate(timeout=120)
    assert (driver.returncode, output) == (CODES[number], "rate 0.1\n"), errors
    assert not (tmp_path / "deployed").exists()
    assert is_stopped_by(tmp_path, number.name), errors
    assert f"stopped by {number.name}. To resume it from its newest checkpoint, run" in errors
    assert ("Traceback" in errors) == (number is signal.SIGINT)


@pytest.mark.parametrize("number", CODES)
def test_the_second_signal_shows_only_the_lines_of_the_user(
    tmp_path: Path, started: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    driver = start_driver(tmp_path, script(tmp_path, SWEEP))
    started.append(driver)
    assert eventually(lambda: trains(tmp_path))
    driver.send_signal(number)
    assert driver.stderr is not None
    first = next(line for line in driver.stderr if "ends after its next checkpoint" in line)
    # Whichever comes second, the first decides.
    driver.send_signal(signal.SIGTERM if number is signal.SIGINT else signal.SIGINT)
    _, errors = driver.communicate(timeout=120)
    assert number.name in first
    assert not (tmp_path / "deployed").exists()
    if number is signal.SIGTERM:
        assert (driver.returncode, "Traceback" in errors) == (143, False), errors
        return
    assert driver.returncode == -signal.SIGINT
    places = re.findall(r'File "(.*)", line', errors)
    assert set(places) == {str(tmp_path / "script.py")}
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")


def test_under_nohup_a_run_goes_on(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    (tmp_path / "script.py").write_text(PREAMBLE + script(tmp_path, FIT))
    driver = subprocess.Popen(
        ["nohup", sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started.append(driver)
    assert eventually(lambda: trains(tmp_path))
    driver.send_signal(signal.SIGHUP)
    (tmp_path / "until").touch()
    _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 0, errors
    assert Result.from_path(tmp_path / "runs" / "run").finished


def ended(driver: subprocess.Popen[str]) -> tuple[str, str]:
    """What an interrupted driver says is left of its run, once it has ended."""
    children = psutil.Process(driver.pid).children(recursive=True)
    output, errors = driver.communicate(timeout=120)
    assert eventually(lambda: not [each for each in children if is_alive(each)])
    return output, errors


PAUSES = ["[0.0] * 4", "[0.02] * 4", "[0.1] * 4", "[0.0005] * 4000"]
EACH_TIME = ("[0.02] * 4", "[0.0005] * 4000")


# It is this process that gets the signals; two of them on Ray are in the tests of a run's end.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("cluster", "pauses"),
    [
        *(("local", pauses) for pauses in PAUSES if pauses in EACH_TIME),
        *(only_in_sweep("local", pauses) for pauses in PAUSES if pauses not in EACH_TIME),
        *(only_in_sweep("ray", pauses) for pauses in PAUSES),
    ],
)
def test_however_many_signals_come_nothing_is_left(
    tmp_path: Path, started: list[subprocess.Popen[str]], cluster: str, pauses: str
) -> None:
    then = INTERRUPTED.replace("PAUSES", pauses).replace("NUMBER", "signal.SIGINT")
    preamble = WITH_RAY if cluster == "ray" else PREAMBLE
    driver = start_driver(tmp_path, script(tmp_path, then, cluster=cluster), preamble=preamble)
    started.append(driver)
    assert eventually(lambda: trains(tmp_path))
    output, errors = ended(driver)
    assert "left: []" in output, errors


IN_AN_EPOCH = """
import tempfile
from pathlib import Path
import numpy as np

os.environ["TMPDIR"] = HERE
tempfile.tempdir = None

def train():
    import torch
    from polytrain.torch import TrainingState, prepare_model

    class Steps:
        taken = 0

    model = prepare_model(torch.nn.Linear(1, 2), parallel_strategy=STRATEGY)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = TrainingState(model=model, optimizer=optimizer)
    if not state.restore() and REPORTS_FIRST:
        # A stop waits for another checkpoint: that of the epoch's end.
        state.report({"epoch": 0}, epoch=0)
    shard = polytrain.get_dataset_shard("train")
    for batch in shard.iter_torch_batches(batch_size=1, dtypes=torch.float32):
        if Steps.taken == 20:
            Path(HERE, "trains").touch()
        optimizer.zero_grad()
        model(batch["x"][:, None]).square().mean().backward()
        optimizer.step()
        Steps.taken += 1
        time.sleep(0.01)
    state.report({"epoch": 1}, epoch=1)

make_trainer(
    "torch", train, datasets={"train": {"x": np.linspace(0, 1, 100_000)}},
    scaling_config=ScalingConfig(num_workers=WORKERS, cluster="local"),
    run_config=RunConfig(
        storage_path="runs", name="run", progress=False,
        checkpoint_config=polytrain.CheckpointConfig(memory=MEMORY),
    ),
).fit()
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("signals", "workers", "memory", "strategy"),
    [
        only_in_sweep(2, 1, 1, "ddp"),
        only_in_sweep(2, 2, None, "ddp"),
        (2, 2, 1, "fsdp"),
        (1, 2, None, "ddp"),
        only_in_sweep(1, 2, 1, "fsdp"),
    ],
)
def test_a_stop_that_waits_for_no_checkpoint_keeps_the_state_that_is_there(
    tmp_path: Path,
    started: list[subprocess.Popen[str]],
    signals: int,
    workers: int,
    memory: int | None,
    strategy: str,
) -> None:
    """The first signal waits for the end of a long epoch, if a checkpoint was made before."""
    names = {"HERE": str(tmp_path), "STRATEGY": strategy, "REPORTS_FIRST": signals > 1}
    code = IN_AN_EPOCH
    for name, value in {**names, "WORKERS": workers, "MEMORY": memory}.items():
        code = code.replace(name, repr(value))
    driver = start_driver(tmp_path, code)
    started.append(driver)
    assert eventually((tmp_path / "trains").exists, seconds=60)
    driver.send_signal(signal.SIGINT)
    if signals > 1:
        assert driver.stderr is not None
        assert any("A second signal ends it at once" in line for line in driver.stderr)
        driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == -signal.SIGINT
    kept = Result.from_path(tmp_path / "runs" / "run").checkpoint
    assert kept is not None, errors
    kept.verify()
    position = json.loads(Path(kept.path, "polytrain-manifest.json").read_text())["manifest"]
    assert position["positions"]["train"]["start"] >= 19 * workers
