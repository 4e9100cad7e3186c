"""Progress as people and programs see it: on a terminal, in a file, and in a pipe."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.terminal import PYTHON, Terminal, terminal

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

def train(config):
    context = polytrain.get_context()
    rank, is_first = context.get_world_rank(), context.get_attempt() == 0
    for step in range(1, 100_000):
        if Path(config["until"]).exists():
            return
        if rank == 0 and step == 3:
            print("wide", "x" * 200, "end")
        if rank == 1 and step == 5 and is_first and config["is_killed"]:
            print("the last words of rank 1", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == 7 and is_first and config["is_killed"]:
            signal.pause()  # until the attempt ends, however late rank 1 is
        time.sleep(0.02)
        polytrain.report({"loss": 1 / step, "evil\\n\\x1b[2J": step})

if __name__ == "__main__":
    trainer = make_trainer(
        "reference",
        train,
        train_loop_config={"until": os.path.abspath("until"), "is_killed": "kill" in sys.argv},
        scaling_config=ScalingConfig(num_workers=2, cluster="local"),
        run_config=RunConfig(
            name="run", storage_path="runs", progress=sys.argv[1],
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    if "background" not in sys.argv:
        result = trainer.fit()
    else:
        run = trainer.fit(wait=False)
        while run.status().step < 20:
            time.sleep(0.01)
        print("a line of the script,", end=" ", flush=True)
        time.sleep(0.6)  # meanwhile the lines are drawn again
        print("and its end", flush=True)
        subprocess.run(["echo", "from a program that it starts"])
        result = run.result()
    print("finished:", result.finished)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@dataclass(kw_only=True)
class Session:
    """What was on a terminal while a run trained on it."""

    training: list[str]
    narrow: list[str]
    wide: list[str]
    end: list[str]
    text: str
    """All that had been printed before the terminal became narrow."""

    exit_code: int
    scrolls_whole: bool
    cursor_row: int


def is_training(screen: Terminal) -> bool:
    return "step" in screen.rows[-2] and "ranks" in screen.rows[-1]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One run that loses a rank, on a terminal that is made narrow and wide meanwhile."""
    directory = tmp_path_factory.mktemp("session")
    (directory / "script.py").write_text(SCRIPT)
    command = (PYTHON, "script.py", "auto", "kill", "background")
    with terminal(*command, directory=directory) as screen:
        screen.show_until(lambda: is_training(screen) and "that it starts" in screen.text)
        training, text = screen.rows, screen.text
        screen.resize(40, 12)
        screen.show_until(
            lambda: is_training(screen) and all(len(row) < 40 for row in screen.rows[-2:])
        )
        narrow = screen.rows
        screen.resize(100, 30)
        screen.show_until(lambda: is_training(screen) and "evil" in screen.rows[-2])
        wide = screen.rows
        (directory / "until").touch()
        exit_code = screen.show_all()
        yield Session(
            training=training,
            narrow=narrow,
            wide=wide,
            end=screen.rows,
            text=text,
            exit_code=exit_code,
            scrolls_whole=screen.scrolls_whole,
            cursor_row=screen.cursor_row,
        )


def test_two_lines_stay_at_the_bottom(session: Session) -> None:
    first, second = session.training[-2:]
    assert first.startswith("run · step ")
    assert " steps/s" in first
    assert "loss 0." in first
    assert second.startswith("2 ranks · 1 restart, last: rank 1: killed by ")
    assert "goodput" in second
    assert not any("steps/s" in row for row in session.training[:-2])


def test_a_name_with_control_characters_is_shown_with_escapes(session: Session) -> None:
    assert "evil\\n\\x1b[2J " in session.wide[-2]


def test_a_narrow_terminal_has_what_matters_most(session: Session) -> None:
    assert "step" in session.narrow[-2]
    assert all(len(row) < 40 for row in session.narrow[-2:])
    assert not any("steps/s" in row for row in session.narrow[:-2])


def test_a_wider_terminal_has_no_trace_of_the_lines_before(session: Session) -> None:
    assert sum("· step" in row for row in session.wide) == 1
    assert sum("2 ranks ·" in row for row in session.wide) == 1


@pytest.mark.parametrize(
    "line",
    ["a line of the script, and its end", "from a program that it starts"],
)
def test_what_others_print_meanwhile_is_left_alone(session: Session, line: str) -> None:
    assert line in session.text.splitlines()


def test_a_failure_is_shown_with_its_last_lines_and_the_next_command(session: Session) -> None:
    text = session.text
    assert text.count("run: failed: rank 1: killed by ") == 1
    assert "    the last words of rank 1" in text.splitlines()
    # The terminal may break the line between them.
    assert re.search(r"--rank\s+1", text)


def test_at_the_end_the_terminal_is_as_it_was(session: Session) -> None:
    assert session.exit_code == 0
    assert session.scrolls_whole
    assert session.end[session.cursor_row - 1] == "finished: True"
    assert not any(session.end[session.cursor_row :])
    assert any(re.fullmatch(r"run: finished after .*, 1 restart", row) for row in session.end)


def test_standard_output_in_a_file_has_what_ranks_print_unwrapped(directory: Path) -> None:
    output = directory / "out.txt"
    shell = f"{shlex.quote(PYTHON)} script.py auto > out.txt"
    with terminal("sh", "-c", shell, directory=directory) as screen:
        screen.show_until(lambda: is_training(screen) and "end\n" in output.read_text())
        (directory / "until").touch()
        assert screen.show_all() == 0
        text = screen.text
    written = output.read_text()
    assert f"(rank 0) wide {'x' * 200} end\n" in written
    assert written.endswith("finished: True\n")
    assert "xxx" not in text
    assert "\x1b" not in written


def test_ctrl_c_leaves_the_terminal_clean(directory: Path) -> None:
    with terminal(PYTHON, "script.py", "live", directory=directory) as screen:
        screen.show_until(lambda: is_training(screen))
        screen.type(b"\x03")
        assert screen.show_all() == -signal.SIGINT
        assert re.search("run: stopped after .*: stopped by a signal: SIGINT", screen.text)
        assert screen.scrolls_whole
        assert screen.rows[screen.cursor_row - 1] == "KeyboardInterrupt"
        assert not any("steps/s" in row for row in screen.rows)


def started(directory: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> Any:
    (directory / "until").touch()
    return subprocess.run(
        [*prefix, sys.executable, "script.py", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_under_nohup_each_event_is_a_line(directory: Path) -> None:
    done = started(directory, "auto", prefix=("nohup",))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("run: ")]
    assert lines[0].startswith("run: starting (2 workers on this machine")
    assert lines[1] == "run: training on 2 ranks"
    assert lines[-1].startswith("run: finished after ")
    assert "\x1b" not in done.stderr + done.stdout
    assert "\r" not in done.stderr


def test_json_lines_are_for_programs(directory: Path) -> None:
    done = started(directory, "json")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert {each["schema_version"] for each in found} == {1}
    assert found[0]["event"] == "run_started"
    assert found[1]["event"] == "attempt_started"
    assert (found[-1]["event"], found[-1]["state"]) == ("run_ended", "finished")
    assert found[0]["path"] == str(directory / "runs" / "run")


def test_nothing_is_shown_if_nothing_is_wanted(directory: Path) -> None:
    done = started(directory, "none")
    assert done.stdout == "finished: True\n"
    assert done.stderr == ""


def test_a_run_survives_the_reader_of_its_standard_error(directory: Path) -> None:
    """`python script.py 2>&1 >out | head -1`"""
    with subprocess.Popen(
        [sys.executable, "script.py", "plain"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline()
        process.stderr.close()
        (directory / "until").touch()
        assert process.stdout.read().endswith("finished: True\n")
    assert process.returncode == 0


def test_the_command_that_a_failure_names_works(directory: Path) -> None:
    script = directory / "script.py"
    script.write_text(SCRIPT.replace("max_failures=1", "max_failures=0"))
    done = subprocess.run(
        [sys.executable, "script.py", "plain", "kill"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()
    # All that is known of the cause is said once.
    assert sum("killed by SIGKILL" in line for line in said) == 1
    assert sum("the last words of rank 1" in line for line in said) == 1
    [more] = [line for line in said if line.startswith("To see more: ")]
    program, *arguments = shlex.split(more.removeprefix("To see more: "))
    assert program == "polytrain"
    shown = subprocess.run(
        [sys.executable, "-m", "polytrain", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert "the last words of rank 1" in shown.stdout


BARS = """
import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

def train():
    import time
    from pathlib import Path
    from tqdm import tqdm
    # Without it, tqdm may not show a step that comes within 0.1 s.
    for done in tqdm(range(2), desc="batches", ncols=60, mininterval=0):
        while not Path(f"until{done}").exists():
            time.sleep(0.01)
    print("after the bar")

if __name__ == "__main__":
    make_trainer(
        "reference", train,
        scaling_config=ScalingConfig(num_workers=2, cluster="local"),
        run_config=RunConfig(name="run", storage_path="runs"),
    ).fit()
"""


def test_a_bar_of_the_training_function_is_seen_while_it_moves(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BARS)
    with terminal(PYTHON, "script.py", directory=tmp_path) as screen:

        def is_seen(share: str) -> bool:
            # Above the two lines of the run, a row for each rank.
            return all(
                row.startswith(f"(rank {rank}) batches: ") and share in row
                for rank, row in enumerate(screen.rows[-4:-2])
            )

        screen.show_until(lambda: is_seen(" 0%|"))
        (tmp_path / "until0").touch()
        screen.show_until(lambda: is_seen(" 50%|"))
        (tmp_path / "until1").touch()
        assert screen.show_all() == 0
    for rank in (0, 1):
        written = [row for row in screen.text.splitlines() if row.startswith(f"(rank {rank})")]
        assert len(written) == 2
        assert written[0].startswith(f"(rank {rank}) batches: 100%|")
        assert written[1] == f"(rank {rank}) after the bar"
