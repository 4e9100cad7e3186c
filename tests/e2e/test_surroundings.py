"""Scripts started as people start them: the environment and the shell differ, the run doesn't."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from tests.sweeps import only_in_sweep

import polytrain

SCRIPT = """
import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

def train():
    print("Größe", polytrain.get_context().get_world_size())
    polytrain.report({"answer": 42})

# Not below `if __name__ == "__main__"`: worker processes don't import the script.
result = make_trainer(
    "reference",
    train,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path="runs"),
).fit()
print("answer", result.metrics["answer"])
"""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One way to start the script."""

    arguments: tuple[str, ...] = ("script.py",)
    standard_input: str | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set; None removes one."""

    encoding: str = "utf-8"


STARTS = {
    "no home": Start(environment={"HOME": None}),
    "a plain locale": Start(environment={"LC_ALL": "C", "LANG": None}),
    "an old encoding": Start(environment={"PYTHONIOENCODING": "latin-1"}, encoding="latin-1"),
    "from standard input": Start(arguments=("-",), standard_input=SCRIPT),
    "as an argument": Start(arguments=("-c", SCRIPT)),
    "as a module": Start(arguments=("-m", "package.script")),
    "in a debugger": Start(arguments=("-m", "debugpy", "--listen", "127.0.0.1:0", "script.py")),
    "optimised": Start(arguments=("-OO", "script.py")),
}


ONLY_IN_SWEEP = ("no home", "in a debugger", "optimised")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for place in (tmp_path, tmp_path / "package"):
        (place / "script.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.mark.sweep
@pytest.mark.parametrize(
    "start",
    [
        (only_in_sweep if name in ONLY_IN_SWEEP else pytest.param)(start, id=name)
        for name, start in STARTS.items()
    ],
)
def test_a_script_runs_however_it_is_started(start: Start, directory: Path) -> None:
    variables = {**os.environ, **start.environment}
    run = subprocess.run(
        [sys.executable, *start.arguments],
        input=None if start.standard_input is None else start.standard_input.encode(),
        cwd=directory,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        timeout=120,
    )
    output = run.stdout.decode(start.encoding)
    assert run.returncode == 0, run.stderr.decode(errors="replace")
    assert "answer 42" in output
    assert "(rank 1) Größe 2" in output


def test_a_home_that_cannot_be_written_to_is_named_before_anything_starts(directory: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace('storage_path="runs"', "")],
        cwd=directory,
        env={**os.environ, "HOME": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "RunConfig.storage_path" in run.stderr
    assert "nothing was started" in run.stderr


def test_a_run_without_standard_streams_ends_well(directory: Path) -> None:
    """As a daemon's children have it."""
    run = subprocess.run(
        ["sh", "-c", '"$0" script.py <&- >&- 2>&-', sys.executable],
        cwd=directory,
        timeout=120,
    )
    assert run.returncode == 0
    [journal] = directory.glob("runs/*/journal.jsonl")
    assert '"answer": 42' in journal.read_text()


HANGS_UP = """
import os, signal
import polytrain
from polytrain import ScalingConfig, make_trainer

def train():
    os.kill(os.getpid(), signal.SIGHUP)
    polytrain.report({"answer": 42})

result = make_trainer("reference", train, scaling_config=ScalingConfig(num_workers=2)).fit()
print("answer", result.metrics["answer"], "restarts", result.restarts)
"""


def test_a_run_under_nohup_survives_the_end_of_its_terminal(tmp_path: Path) -> None:
    run = subprocess.run(
        ["nohup", sys.executable, "-c", HANGS_UP],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "answer 42 restarts 0" in run.stdout, run.stderr


DEFINED = """
import time
import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

def train(config):
    print("begun")
    while config["waits"]:
        time.sleep(0.01)
    polytrain.report({"answer": 42})

def fit(waits):
    return make_trainer(
        "reference", train, train_loop_config={"waits": waits},
        scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path="runs"),
    ).fit()
"""


@pytest.fixture
def kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    monkeypatch.chdir(tmp_path)
    manager, client = start_new_kernel()
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_notebooks_interrupt_button_stops_the_run_and_the_cells_below(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    manager, client = kernel
    assert client.execute_interactive(DEFINED, timeout=60)["content"]["status"] == "ok"
    waiting = client.execute("fit(waits=True)")
    # As "Run all": the next cell is in the queue already.
    next_cell = client.execute("open('deployed', 'w').close()")
    while "begun" not in client.get_iopub_msg(timeout=60)["content"].get("text", ""):
        pass
    manager.interrupt_kernel()
    messages = [client.get_shell_msg(timeout=60) for _ in range(2)]
    replies = {each["parent_header"]["msg_id"]: each["content"] for each in messages}
    assert replies[waiting]["ename"] == "KeyboardInterrupt"
    shown = "".join(replies[waiting]["traceback"])
    assert "fit(waits=" in shown
    assert str(Path(polytrain.__file__).parent) not in shown
    assert replies[next_cell]["status"] == "aborted"
    assert not Path("deployed").exists()
    reply = client.execute_interactive(
        "assert fit(waits=False).metrics['answer'] == 42", timeout=60
    )
    assert reply["content"]["status"] == "ok", reply["content"]


def test_a_notebooks_cell_has_one_output_of_progress_which_is_replaced(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    _, client = kernel
    assert client.execute_interactive(DEFINED, timeout=60)["content"]["status"] == "ok"
    outputs: list[dict[str, Any]] = []
    client.execute_interactive("fit(waits=False);", timeout=60, output_hook=outputs.append)
    shown = [each for each in outputs if each["msg_type"] == "display_data"]
    replaced = [each for each in outputs if each["msg_type"] == "update_display_data"]
    assert len(shown) == 1
    assert replaced
    pages = [each["content"]["data"]["text/html"] for each in (*shown, *replaced)]
    assert "starting (2 workers" in pages[0]
    assert "training on 2 ranks" in pages[-1]
    assert ": finished" in pages[-1]
    text = "".join(each["content"].get("text", "") for each in outputs)
    assert "(rank 0) begun" in text
    assert "starting" not in text
