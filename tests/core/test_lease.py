"""At most one driver works on a run, whatever becomes of the others."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.faulty_storage import ERROR, FaultyFileSystem, FromThenOn, never
from tests.object_storage import Bucket

import polytrain
from polytrain import (
    Checkpoint,
    FailureConfig,
    FailureKind,
    RunConfig,
    RunOwnedError,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    make_trainer,
)
from polytrain.run.lease import Lease, leased
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage

DRIVER = """
import pickle, sys
from pathlib import Path
from polytrain.errors import RunOwnedError
from polytrain.run import lease as leases

location, machine, beat = pickle.loads(bytes.fromhex(sys.argv[1]))
if machine:
    leases._this_machine = lambda: machine
leases._BEAT_EVERY_S = beat
storage = location.open()
print("ready", flush=True)
sys.stdin.readline()
try:
    with leases.leased(storage, storage) as lease:
        print("owner", lease.token, flush=True)
        for line in sys.stdin:
            if line == "end\\n":
                break
            lease.check()
            print("still owner", flush=True)
except RunOwnedError as error:
    print("refused:", error, flush=True)
"""


class Driver:
    """A process that wants a run."""

    def __init__(self, location: Location, *, machine: str = "", beat_every_s: float = 5) -> None:
        what = pickle.dumps((location, machine, beat_every_s)).hex()
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.hear() == "ready"

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def end(self) -> None:
        self.say("end")
        self.process.wait()


Start = Callable[..., Driver]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts drivers that end with the test."""
    started: list[Driver] = []

    def begin(location: Location, **how: Any) -> Driver:
        started.append(Driver(location, **how))
        return started[-1]

    yield begin
    for driver in started:
        driver.process.send_signal(signal.SIGCONT)
        driver.process.kill()
        driver.process.communicate()


@pytest.fixture(params=["directory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "directory":
        return Location.of(tmp_path / "run")
    request.getfixturevalue("bucket")
    return Location.of("s3://bucket/runs/run")


@pytest.fixture
def storage(location: Location) -> Storage:
    return location.open()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners are given up for dead soon."""
    monkeypatch.setattr("polytrain.run.lease._DEAD_AFTER_S", 0.5)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the user has been told."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_of_many_drivers_one_gets_the_run(location: Location, start: Start) -> None:
    drivers = [start(location) for _ in range(4)]
    for driver in drivers:
        driver.say("go")
    answers = {driver: driver.hear() for driver in drivers}
    [owner] = [driver for driver, answer in answers.items() if answer.startswith("owner")]
    pids = {str(driver.process.pid) for driver in drivers}
    for driver, answer in answers.items():
        if driver is not owner:
            assert answer.startswith(f"refused: The run in {location.address} is being worked on")
            found = re.search(r"process (\d+) on (\S+), since (\d{4}-\d\d-\d\dT[\d:]+)", answer)
            assert found is not None
            assert found[1] in pids - {str(driver.process.pid)}
            assert found[2] == socket.gethostname()
    assert owner.ask("check") == "still owner"


def test_a_driver_that_comes_later_is_reported_who_works_on_the_run(
    location: Location, start: Start, storage: Storage
) -> None:
    owner = start(location)
    assert owner.ask("go") == "owner 1"
    expected = rf"process {owner.process.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-"
    with pytest.raises(RunOwnedError, match=expected) as caught, leased(storage, storage):
        pass
    assert "another name" in str(caught.value)
    assert owner.ask("check") == "still owner"


def test_a_run_is_free_when_its_driver_has_ended(
    location: Location, start: Start, storage: Storage, messages: Callable[[], list[str]]
) -> None:
    for number in range(1, 4):
        owner = start(location)
        assert owner.ask("go") == f"owner {number}"
        owner.end()
    with leased(storage, storage) as lease:
        assert lease.token == 4
    assert messages() == []


@pytest.mark.parametrize("by_s", [86_400, -86_400])
def test_a_clock_that_is_set_neither_loses_nor_takes_a_lease(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    location = Location.of(tmp_path / "run")
    storage, real = location.open(), time.time
    monkeypatch.setattr("polytrain.run.lease._BEAT_EVERY_S", 0.05)
    elsewhere = start(location, machine="elsewhere", beat_every_s=0.05)
    with monkeypatch.context() as patch:
        with leased(storage, storage) as lease:
            patch.setattr(time, "time", lambda: real() + by_s)
            answer = elsewhere.ask("go")
            lease.check()
        assert answer.startswith("refused")
    owner = start(location, machine="elsewhere", beat_every_s=0.05)
    assert owner.ask("go") == "owner 2"
    monkeypatch.setattr(time, "time", lambda: real() + by_s)
    with pytest.raises(RunOwnedError), leased(storage, storage):
        pass
    assert owner.ask("check") == "still owner"


@pytest.mark.parametrize("is_reaped", [True, False], ids=["reaped", "zombie"])
def test_a_driver_that_was_killed_here_is_followed_at_once(
    location: Location,
    start: Start,
    storage: Storage,
    messages: Callable[[], list[str]],
    is_reaped: bool,
) -> None:
    """In a container, nobody may ever ask for a dead driver's exit code."""
    owner = start(location)
    assert owner.ask("go") == "owner 1"
    owner.process.kill()
    os.waitid(os.P_PID, owner.process.pid, os.WEXITED | os.WNOWAIT)
    if is_reaped:
        owner.process.wait()
    with leased(storage, storage) as lease:
        assert lease.token == 2
    assert messages() == [], "nobody was waited for"


def test_a_driver_on_another_machine_that_works_is_left_alone(
    location: Location, start: Start, storage: Storage
) -> None:
    owner = start(location, machine="another", beat_every_s=0.02)
    assert owner.ask("go") == "owner 1"
    expected = f"process {owner.process.pid} on"
    with pytest.raises(RunOwnedError, match=expected), leased(storage, storage):
        pass
    assert owner.ask("check") == "still owner"


def test_a_driver_that_was_killed_on_another_machine_is_waited_for(
    location: Location,
    start: Start,
    storage: Storage,
    messages: Callable[[], list[str]],
    soon: None,
) -> None:
    owner = start(location, machine="another")
    assert owner.ask("go") == "owner 1"
    owner.process.kill()
    owner.process.wait()
    with leased(storage, storage) as lease:
        assert lease.token == 2
    [warning] = messages()
    assert location.address in warning
    assert f"process {owner.process.pid} on {socket.gethostname()}" in warning
    assert "up to 0.5 s" in warning


@pytest.mark.parametrize("location", ["directory"], indirect=True)
def test_a_copy_of_a_run_belongs_to_no_driver_and_another_path_to_it_does(
    location: Location,
    storage: Storage,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = start(location, beat_every_s=0.02)
    assert owner.ask("go") == "owner 1"
    (tmp_path / "link").symlink_to(location.address)
    same = Location.of(tmp_path / "link").open()
    expected = f"in {same.root} is being worked on by process {owner.process.pid}"
    with pytest.raises(RunOwnedError, match=expected), leased(same, same):
        pass
    copy = Location.of(tmp_path / "copy").open()
    copy.write("leases/000001", storage.read("leases/000001"))
    monkeypatch.setattr("polytrain.run.lease._DEAD_AFTER_S", 0.5)
    with leased(copy, copy) as lease:
        assert lease.token == 2
    assert owner.ask("check") == "still owner"


def test_a_driver_that_was_taken_for_dead_finds_out(
    location: Location, start: Start, storage: Storage, soon: None
) -> None:
    owner = start(location, machine="another")
    assert owner.ask("go") == "owner 1"
    owner.process.send_signal(signal.SIGSTOP)
    with leased(storage, storage) as lease:
        owner.process.send_signal(signal.SIGCONT)
        answer = owner.ask("check")
        assert answer.startswith("refused:")
        assert f"taken over by process {os.getpid()} on {socket.gethostname()}" in answer
        # Its last words don't end the lease of its successor.
        owner.process.wait()
        lease.check()
        late = start(location)
        assert late.ask("go").startswith("refused:")


def test_a_run_belongs_to_one_at_a_time_within_a_process(storage: Storage) -> None:
    with leased(storage, storage) as lease:
        expected = f"process {os.getpid()} on"
        with pytest.raises(RunOwnedError, match=expected), leased(storage, storage):
            pass
        lease.check()
    with leased(storage, storage) as lease:
        assert lease.token == 2


def test_a_driver_counts_on_from_the_journal_if_the_leases_were_deleted(storage: Storage) -> None:
    """What it writes would otherwise count as that of an earlier driver."""
    with storage.open_log("journal.jsonl", series="000007") as log:
        log.write('{"time": 1.0, "token": 7, "event": "Opened", "format": "of a later version"}\n')
        log.write('{"time": 2.0, "token": 8, "ev')
    with leased(storage, storage) as lease:
        assert lease.token == 8


def test_a_driver_that_begins_while_another_reads_the_journal_is_not_passed_by(
    storage: Storage,
) -> None:
    with ExitStack() as stack:

        def begins() -> None:
            stack.enter_context(leased(storage, storage))
            log = stack.enter_context(storage.open_log("journal.jsonl", series="000001"))
            log.write('{"time": 1.0, "token": 1, "event": "Opened"}\n')
            log.sync()

        second: Any = Slow(storage, after_listing=begins)
        with pytest.raises(RunOwnedError), leased(second, storage):
            pass


def leases(storage: Storage) -> dict[str, Any]:
    return {path: json.loads(storage.read(path)) for path in storage.list("leases")}


def test_a_process_that_has_got_the_number_of_a_dead_one_is_another(
    location: Location, storage: Storage, start: Start, messages: Callable[[], list[str]]
) -> None:
    with leased(storage, storage):
        [(path, lease)] = leases(storage).items()
    other = start(location).process
    storage.write(path, json.dumps({**lease, "released": False, "pid": other.pid}).encode())
    with leased(storage, storage) as next_lease:
        assert next_lease.token == 2
    assert messages() == []


@pytest.mark.parametrize("content", [b"", b'{"host": "a', b"{}", b"[]", b"null", b"\xff\x00"])
def test_a_torn_lease_is_waited_for(
    storage: Storage, messages: Callable[[], list[str]], soon: None, content: bytes
) -> None:
    """Whoever wrote it may be alive."""
    storage.write("leases/000001", content)
    with leased(storage, storage) as lease:
        assert lease.token == 2
        lease.check()
    assert len(messages()) == 1


def test_what_a_file_system_leaves_among_the_leases_is_none(storage: Storage) -> None:
    for name in (".nfs000000000001", "README", ".DS_Store", "lost+found/x"):
        storage.write(f"leases/{name}", b"")
    with leased(storage, storage) as lease:
        assert lease.token == 1
        lease.check()


def test_a_lease_that_could_not_be_given_up_is_over_for_its_own_process(
    tmp_path: Path, messages: Callable[[], list[str]]
) -> None:
    """In a notebook, the run is resumed once the storage is back."""
    filesystem = FaultyFileSystem(tmp_path)
    storage = Location.of("run", filesystem, retry_s=0).open()
    with leased(storage, storage) as lease:
        filesystem.faults.fault = FromThenOn(0)
        with pytest.raises(OSError, match=ERROR):
            lease.check()
    filesystem.faults.fault = never
    with leased(storage, storage) as lease:
        assert lease.token == 2
    assert len(messages()) == 1
    assert ERROR in messages()[0]


class Slow:
    """A storage on which something happens between two looks at it."""

    def __init__(self, storage: Storage, *, after_listing: Callable[[], object]) -> None:
        self._storage = storage
        self._happening = [after_listing]

    def list(self, below: str) -> dict[str, int]:
        listed = self._storage.list(below)
        while self._happening:
            self._happening.pop()()
        return listed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


class Stumbling:
    """A storage whose client raises what nobody has expected, three times."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._left = 3
        self.has_worked_again = threading.Event()

    def replace(self, path: str, data: bytes, *, check: Callable[[], None]) -> None:
        if self._left:
            self._left -= 1
            raise TypeError("of the client's own")
        self._storage.replace(path, data, check=check)
        self.has_worked_again.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def test_a_lease_is_renewed_after_an_error_that_nobody_has_expected(
    tmp_path: Path, messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its run would be taken for dead, and be taken over."""
    monkeypatch.setattr("polytrain.run.lease._BEAT_EVERY_S", 0.01)
    storage = Location.of(tmp_path / "run").open()
    stumbling: Any = Stumbling(storage)
    with leased(storage, stumbling):
        assert stumbling.has_worked_again.wait(timeout=30)
    failed, again = messages()
    assert "of the client's own" in failed, "said once, although it has come three times"
    for message in (failed, again):
        assert message.startswith(f"The lease leases/000001 in {tmp_path / 'run'} ")


def test_nobody_passes_by_who_came_first(bucket: Bucket) -> None:
    """One finds another's lease, which is then withdrawn; a third has seen neither."""
    storage = Location.of("s3://bucket/run").open()
    with ExitStack() as stack:
        owners: list[Lease] = []

        def others_come() -> None:
            storage.write("leases/000001.withdrawn", b"{}")
            second: Any = Slow(storage, after_listing=withdraw)
            owners.append(stack.enter_context(leased(second, storage)))

        def withdraw() -> None:
            storage.delete("leases/000001.withdrawn")

        third: Any = Slow(storage, after_listing=others_come)
        with pytest.raises(RunOwnedError), leased(third, storage):
            pass
        [owner] = owners
        owner.check()


def test_a_run_in_progress_is_refused_to_a_second_driver(tmp_path: Path) -> None:
    def trainer(function: Callable[[], None]) -> Trainer:
        return make_trainer(
            "reference",
            function,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="one", storage_path=tmp_path, progress=False),
        )

    def again() -> None:
        with pytest.raises(RunOwnedError, match=f"process {os.getpid()} on"):
            trainer(lambda: None).fit()

    assert trainer(again).fit().error is None


def take_over(run: Path) -> None:
    """As another driver does that has taken this one for dead."""
    # By its name: a beat that is being written has a second file beside it.
    mine = run / "leases/000001"
    owner = json.loads(mine.read_text()) | {"host": "elsewhere", "pid": 77, "machine": "other"}
    # At once, as a storage writes: a beat may look at any time.
    unfinished = run / "another's"
    unfinished.write_text(json.dumps(owner))
    unfinished.rename(mine.with_name("000002"))


def beat_only_without_checkpoints(monkeypatch: pytest.MonkeyPatch, reports: str) -> None:
    """Let the lease be checked by a commit, or by a heartbeat."""
    beat_every_s = 3600 if reports == "checkpoints" else 0.01
    monkeypatch.setattr("polytrain.run.lease._BEAT_EVERY_S", beat_every_s)


def fit_whatever_fails(train: Callable[[], None], storage: Path) -> None:
    """Train in this process, with any number of failures."""
    make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            progress=False,
            failure_config=FailureConfig(max_failures=-1, retry_user_errors=True),
        ),
    ).fit()


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_driver_whose_directory_was_deleted_does_not_write_into_the_next_one(
    location: Location, storage: Storage, start: Start, begun_anew: bool
) -> None:
    """The next driver has the same token, since there is no other lease."""
    with leased(storage, storage) as lease:
        storage.delete_below("leases")
        if begun_anew:
            assert start(location).ask("go") == "owner 1"
        before = leases(storage)
        with pytest.raises(RunOwnedError, match=r"isn't the directory .* deleted meanwhile"):
            lease.check()
    assert leases(storage) == before


@pytest.mark.parametrize("looks", [0, 1])
@pytest.mark.parametrize("moves", [True, False])
def test_a_directory_that_goes_while_its_lease_is_renewed_is_not_made_anew(
    tmp_path: Path, moves: bool, looks: int
) -> None:
    """Its driver would take it for its own, and train into it."""
    run, moved = tmp_path / "run", tmp_path / "moved"

    def go() -> None:
        run.rename(moved)
        if not moves:
            shutil.rmtree(moved)

    storage = Location.of(run).open()
    renewed: Any = Slow(storage, after_listing=go) if looks else storage
    with leased(storage, renewed):
        if not looks:
            go()
    assert not run.exists()
    if moves:
        assert json.loads((moved / "leases/000001").read_text())["released"] is bool(looks)


@pytest.mark.parametrize("reports", ["checkpoints", "metrics alone"])
@pytest.mark.parametrize("moves", [True, False])
def test_a_run_whose_directory_is_gone_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: str, moves: bool
) -> None:
    of_another = tmp_path / "run/checkpoints/checkpoint_000007-1.0/weights"

    def train() -> None:
        (tmp_path / "run").rename(tmp_path / "moved")
        if not moves:
            # A heartbeat may leave a file there while it is deleted.
            shutil.rmtree(tmp_path / "moved", ignore_errors=True)
        of_another.parent.mkdir(parents=True)
        of_another.touch()
        while True:
            directory = tmp_path / "files"
            directory.mkdir(exist_ok=True)
            made = Checkpoint.from_directory(directory) if reports == "checkpoints" else None
            polytrain.report({"loss": 1.0}, checkpoint=made)

    beat_only_without_checkpoints(monkeypatch, reports)
    with pytest.raises(TrainingFailedError) as caught:
        fit_whatever_fails(train, tmp_path)
    [failure] = caught.value.failures
    assert f"{tmp_path / 'run'} isn't the directory any more" in failure.message
    assert list(tmp_path.glob("run/leases/*")) == []
    assert list(tmp_path.glob("run/checkpoints/*/polytrain-manifest.json")) == []
    assert of_another.exists(), "another driver has begun a run there, and stores a checkpoint"


@pytest.mark.parametrize("then", ["reports", "fails"])
def test_the_checkpoints_of_a_run_whose_directory_was_renamed_are_not_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    then: str,
) -> None:
    def report() -> None:
        files = tmp_path / "files"
        files.mkdir(exist_ok=True)
        (files / "weights").write_text("1")
        polytrain.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(files))

    def train() -> None:
        report()
        assert [*tmp_path.glob("run/checkpoints/*/polytrain-manifest.json")] != []
        (tmp_path / "run").rename(tmp_path / "moved")
        if then == "fails":
            raise RuntimeError("a bad batch")
        report()

    beat_only_without_checkpoints(monkeypatch, "checkpoints")
    with pytest.raises(TrainingFailedError) as caught:
        fit_whatever_fails(train, tmp_path)
    assert "isn't the directory any more" in caught.value.failures[0].message
    assert caught.value.result is not None
    assert caught.value.result.checkpoint is None
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("reports", ["checkpoints", "metrics alone"])
def test_a_driver_whose_run_was_taken_over_stops_at_once_and_says_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: str
) -> None:
    """However many failures are allowed; without a checkpoint it hears of it by its next beat."""
    launches = []

    def train() -> None:
        launches.append(1)
        take_over(tmp_path / "run")
        while len(launches) == 1:
            directory = tmp_path / "files"
            directory.mkdir(exist_ok=True)
            made = Checkpoint.from_directory(directory) if reports == "checkpoints" else None
            polytrain.report({"launches": len(launches)}, checkpoint=made)

    beat_only_without_checkpoints(monkeypatch, reports)
    with pytest.raises(TrainingFailedError, match="has lost its lease on the run") as caught:
        fit_whatever_fails(train, tmp_path)
    assert launches == [1]
    [failure] = caught.value.failures
    assert failure.kind is FailureKind.LEASE_LOST
    assert "was taken over by process 77 on elsewhere" in failure.message
    assert list(tmp_path.glob("run/checkpoints/*/polytrain-manifest.json")) == []
