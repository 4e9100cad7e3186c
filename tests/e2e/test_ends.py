"""However a run ends, nothing of it is left: Ctrl-C, a killed driver."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.driver import WITH_RAY, start_driver
from tests.sweeps import only_in_sweep

from polytrain.testing.processes import eventually, is_alive, title

SCRIPT = """
def train():
    # A process of the user's own, which must not outlive the run either.
    import subprocess
    subprocess.Popen(["sleep", "1000"])
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "weights").write_text("1.0")
        checkpoint = polytrain.Checkpoint.from_directory(directory)
        polytrain.report({"started": 1}, checkpoint=checkpoint)
    time.sleep(1000)

class Tell:
    @polytrain_plugins.hookimpl
    def polytrain_checkpoint_committed(self):
        print("training", flush=True)

try:
    make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path="runs", progress=False, observers=(Tell(),)),
    ).fit()
except (KeyboardInterrupt, SystemExit):
    let_go()
    left = [c for c in psutil.Process().children(recursive=True) if ours(c)]
    print("interrupted", left, flush=True)
    eventually(lambda: ray.available_resources().get("CPU") == 4)
    print("free CPUs", ray.available_resources().get("CPU"), flush=True)
"""

OURS = '''
import tempfile
from pathlib import Path
import psutil, polytrain_plugins
from polytrain.testing.processes import eventually
from polytrain.workers.processes.cache import let_go

def ours(process):
    """Whether it belongs to a run: an agent, a zygote, a trainer, or what a trainer started."""
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "polytrain.workers" in title or "ray::RayHost" in title or "sleep 1000" in title
'''


Starter = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Starter]:
    """Starts drivers; kills those that a failed test leaves running."""
    drivers: list[subprocess.Popen[str]] = []

    def start(script: str) -> subprocess.Popen[str]:
        drivers.append(start_driver(tmp_path, script, preamble=WITH_RAY))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGINT, only_in_sweep(signal.SIGTERM)])
def test_the_second_signal_releases_everything_at_once(
    started: Starter, tmp_path: Path, number: signal.Signals
) -> None:
    driver = started(OURS + SCRIPT)
    _wait_until_training(driver)
    assert driver.stderr is not None
    driver.send_signal(number)
    printed = next(line for line in driver.stderr if "ends after its next checkpoint" in line)
    assert f"stopped by a signal: {number.name}" in printed
    driver.send_signal(number)
    output, errors = driver.communicate(timeout=60)
    assert "interrupted []" in output, errors
    assert "free CPUs 4.0" in output
    assert not any((tmp_path / "runs").glob("*/staging"))


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["driver", only_in_sweep("zygote")])
def test_killed_process_leaves_none_behind(started: Starter, victim: str) -> None:
    driver = started(OURS + SCRIPT)
    _wait_until_training(driver)
    assert eventually(lambda: len(_ours(driver.pid, "sleep 1000")) == 2)
    ours = _ours(driver.pid)
    if victim == "driver":
        driver.kill()
    else:
        next(p for p in ours if "polytrain.workers.processes.zygote" in title(p)).kill()
    driver.communicate(timeout=60)
    assert eventually(lambda: not [p for p in ours if is_alive(p)]), [str(p) for p in ours]


def _wait_until_training(driver: subprocess.Popen[str]) -> None:
    """Wait for the first checkpoint; if the driver has ended before, show why."""
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line == "training\n", driver.communicate(timeout=60)[1]


def _ours(driver: int, *titles: str) -> list[psutil.Process]:
    """The run's processes below a driver, or those of them that have one of these titles."""
    titles = titles or ("polytrain.workers", "ray::RayHost", "sleep 1000")
    tree = psutil.Process(driver).children(recursive=True)
    return [process for process in tree if any(part in title(process) for part in titles)]
