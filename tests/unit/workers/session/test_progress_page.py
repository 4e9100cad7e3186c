"""What one process writes into its page, another reads; the CPU time of a whole family."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from polytrain.backends.reference import Reference
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.run_spec import RunSpec
from polytrain.data.plan.cursor import Cursor
from polytrain.data.plan.position import StreamPosition
from polytrain.data.plan.stream_partitioner import Segment
from polytrain.data.shards.spec import StreamSpec
from polytrain.data.shards.stream_shard import PartSource, StreamShard
from polytrain.linux import progress_page
from polytrain.linux.processes import cpu_seconds, is_stopped
from polytrain.linux.progress_page import Page, WorkerStage
from polytrain.storage.location import Location
from polytrain.testing.processes import eventually
from polytrain.workers.agents.calls import Acknowledge, message_of
from polytrain.workers.processes.channel import Message
from polytrain.workers.session.checkpoint_files import CheckpointFiles
from polytrain.workers.session.checkpoint_uploader import CheckpointUploader
from polytrain.workers.session.job import LaunchOrder, WorkerJob

JOB = WorkerJob(
    spec=RunSpec(backend=Reference()), near_staging=None, checkpoints=Location.of("/nowhere")
)
ORDER = LaunchOrder(
    attempt_id=AttemptId(token=0, attempt=0), members=(), start=StartingPoint(), first_checkpoint=0
)

WRITER = """
import sys
from polytrain.config.run_spec import RunSpec
from polytrain.linux import progress_page

progress_page.write_to(int(sys.argv[1]))
progress_page.enter(progress_page.WorkerStage.TRAINING)
progress_page.beat()
with progress_page.during(progress_page.WorkerStage.WAITING_FOR_COMMIT):
    progress_page.beat()
    print("waiting", flush=True)
    sys.stdin.readline()
print("over", flush=True)
sys.stdin.readline()
"""

# It works longer than is asked for: the kernel counts user and system time in whole ticks each.
WORKING_CHILD = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.55: pass\\nprint('burnt', flush=True); input()"
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


def line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def test_a_reader_sees_beats_and_stages_of_another_process(page: Page) -> None:
    assert (page.beats, page.stage) == (0, WorkerStage.STARTING)
    with start(WRITER, page.descriptor) as writer:
        assert line_from(writer) == "waiting\n"
        assert (page.beats, page.stage) == (2, WorkerStage.WAITING_FOR_COMMIT)
        go_on(writer)
        assert line_from(writer) == "over\n"
        assert (page.beats, page.stage) == (2, WorkerStage.TRAINING)
        go_on(writer)


class Answering:
    """A channel whose other end commits every checkpoint, and looks at the trainer's page first."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.seen: list[WorkerStage] = []

    def send(self, *messages: Message) -> None:
        self.seen.append(self._page.stage)

    def receive(self) -> Message:
        self.seen.append(self._page.stage)
        return message_of(Acknowledge(attempt=0, checkpoint=0))


def test_a_wait_for_a_commit_shows(page: Page, tmp_path: Path) -> None:
    progress_page.write_to(page.descriptor)
    progress_page.enter(WorkerStage.TRAINING)
    channel = Answering(page)
    uploader = CheckpointUploader(job=JOB, order=ORDER, rank=0, channel=channel, scratch=tmp_path)
    files = CheckpointFiles(write=lambda directory: {})
    uploader.submit(files, step=1, metrics={}, positions={}, report=list, waits=True)
    assert channel.seen == [WorkerStage.TRAINING, WorkerStage.WAITING_FOR_COMMIT]
    assert uploader.stalled_s > 0
    assert page.stage is WorkerStage.TRAINING


class Slow(PartSource):
    """A stream that comes when its reader is seen to wait for it."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def begin(self, epoch: int, segments: Sequence[Segment]) -> None:
        assert self._page.stage is WorkerStage.TRAINING

    def next_part(self, epoch: int, index: int) -> pa.Table | int:
        if index == 1:
            return 3
        assert eventually(lambda: self._page.stage is WorkerStage.WAITING_FOR_DATA, seconds=10)
        return pa.table({"id": [1, 2, 3]})


def test_a_wait_for_a_stream_shows_and_its_batches_are_progress(page: Page) -> None:
    progress_page.write_to(page.descriptor)
    progress_page.enter(WorkerStage.TRAINING)
    schema = pa.schema([("id", pa.int64())])
    shard = StreamShard(
        StreamSpec(name="train", schema=schema, remainder="keep"),
        Slow(page),
        Cursor(StreamPosition(world_size=1)),
        world_size=1,
        rank=0,
    )
    before = page.beats
    [batch] = shard.iter_batches(batch_size=3)
    assert batch["id"].tolist() == [1, 2, 3]
    assert page.beats > before
    assert page.stage is WorkerStage.TRAINING


def test_what_its_children_do_is_a_process_s_work_even_when_they_are_gone() -> None:
    with start(WORKING_CHILD) as parent:
        assert line_from(parent) == "burnt\n"
        assert cpu_seconds(parent.pid) >= 0.5
        go_on(parent)
        assert line_from(parent) == "reaped\n"
        assert cpu_seconds(parent.pid) >= 0.5
        go_on(parent)


def test_a_process_that_is_gone_does_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_seconds(process.pid) == 0
    assert not is_stopped(process.pid)
