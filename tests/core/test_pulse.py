"""What one process writes into its page, another reads; the CPU time of a whole family."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from polytrain.pulse import Page, Stage
from polytrain.workers.processes import cpu_seconds, is_stopped

WRITER = """
import sys
from polytrain import pulse

pulse.write_to(int(sys.argv[1]))
pulse.enter(pulse.Stage.TRAINING)
pulse.beat()
with pulse.during(pulse.Stage.WAITING_FOR_COMMIT):
    pulse.beat()
    print("waiting", flush=True)
    sys.stdin.readline()
print("over", flush=True)
sys.stdin.readline()
"""

WORKING_CHILD = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.5: pass\\nprint('burnt', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE)
sys.stdin.readline()
child.communicate(b"end")
print("reaped", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.close()


def start(script: str, *arguments: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        pass_fds=arguments,
    )


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def test_a_reader_sees_beats_and_stages_of_another_process(page: Page) -> None:
    assert (page.beats, page.stage) == (0, Stage.STARTING)
    with start(WRITER, page.descriptor) as writer:
        assert told(writer) == "waiting\n"
        assert (page.beats, page.stage) == (2, Stage.WAITING_FOR_COMMIT)
        go_on(writer)
        assert told(writer) == "over\n"
        assert (page.beats, page.stage) == (2, Stage.TRAINING)
        go_on(writer)


def test_what_its_children_do_is_a_process_s_work_even_when_they_are_gone() -> None:
    with start(WORKING_CHILD) as parent:
        assert told(parent) == "burnt\n"
        assert cpu_seconds(parent.pid) >= 0.5
        go_on(parent)
        assert told(parent) == "reaped\n"
        assert cpu_seconds(parent.pid) >= 0.5
        go_on(parent)


def test_a_process_that_is_gone_does_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_seconds(process.pid) == 0
    assert not is_stopped(process.pid)
