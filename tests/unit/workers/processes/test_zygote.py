"""A zygote that can't do what it is asked to says why, and serves whoever asks next."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from tests.descriptors import opened

from polytrain import InvalidJobError, ScalingConfig, make_trainer
from polytrain.api.cluster_checks import system_problems
from polytrain.linux.processes import describe_exit
from polytrain.linux.progress_page import Page
from polytrain.testing.processes import eventually
from polytrain.workers.processes import zygote
from polytrain.workers.processes.channel import SocketChannel, pack
from polytrain.workers.processes.forked import ForkRequest
from polytrain.workers.processes.zygote_client import Listener, ZygoteClient
from polytrain.workers.processes.zygote_connection import ZygoteConnection, ZygoteSpec

WORKER = "polytrain.workers.session.worker_process"


@contextmanager
def served_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[ZygoteConnection]:
    """A connection to a zygote on a thread of this process, whose calls can be made to fail."""
    # This process has other children.
    monkeypatch.setattr(zygote, "kill_children", lambda is_doomed: None)
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(f"\0{secrets.token_hex(8)}")
        listener.listen()
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.connect(listener.getsockname())
        serving = threading.Thread(target=zygote.Zygote(listener).serve)
        serving.start()
        try:
            yield ZygoteConnection(connection)
        finally:
            connection.close()
            serving.join(timeout=30)
            assert not serving.is_alive()


def ask_to_fork(connection: ZygoteConnection, number: int) -> Any:
    """Ask for a worker process; the first answer. Nobody will talk to that process."""
    with open(os.devnull, "r+b") as nothing:
        connection.request(
            ["fork", number, dict(os.environ), "/", list(sys.path), [], WORKER],
            [nothing.fileno()] * 4,
        )
    return SocketChannel(connection.socket).receive()


def fails(number: int) -> Callable[..., NoReturn]:
    def fail(*args: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_process_limit_is_reported_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zygote, "thread_count", lambda: 1)
    monkeypatch.setattr(os, "fork", fails(errno.EAGAIN))
    with served_here(monkeypatch) as connection:
        for number in (7, 8):
            kind, answered, how, killed = ask_to_fork(connection, number)
            assert (kind, answered, killed) == ("ended", number, False)
            assert "could not be started" in how
            assert os.strerror(errno.EAGAIN) in how


def test_a_zygote_stays_in_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds modules from there. This one spawns its processes, as it has threads."""
    here = os.getcwd()
    with served_here(monkeypatch) as connection:
        assert ask_to_fork(connection, 1)[:2] == ["forked", 1]
    assert os.getcwd() == here


def test_a_process_that_cannot_be_watched_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its descriptor nobody would notice its end."""
    started = []
    spawn = zygote.spawn

    def spawned(request: ForkRequest, names: int) -> int:
        started.append(spawn(request, names))
        return started[0]

    monkeypatch.setattr(zygote, "spawn", spawned)
    with served_here(monkeypatch) as connection:
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]
        monkeypatch.setattr(os, "pidfd_open", fails(errno.EMFILE))
        kind, _, how, _ = ask_to_fork(connection, 1)
    assert kind == "ended"
    assert os.strerror(errno.EMFILE) in how
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_zygote_with_too_many_files_says_so_and_works_again_later() -> None:
    """Descriptors that come with a request don't arrive then, and nobody else can connect."""
    spec = ZygoteSpec(
        name=f"\0{secrets.token_hex(8)}", environment={}, modules=(), path=tuple(sys.path)
    )
    connection = ZygoteConnection.open(spec)
    try:
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]
        assert connection.pid is not None
        _, most = resource.prlimit(connection.pid, resource.RLIMIT_NOFILE)
        limit = 1 + max(map(int, os.listdir(f"/proc/{connection.pid}/fd")))
        resource.prlimit(connection.pid, resource.RLIMIT_NOFILE, (limit, most))
        with ExitStack() as stack:
            others = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(limit)]
            for other in others:
                other.connect(spec.name)
            with selectors.DefaultSelector() as selector:
                for other in others:
                    selector.register(other, selectors.EVENT_READ, other)
                turned_away = [key.data for key, _ in selector.select(30)]
            assert turned_away[0].recv(1) == b""
            kind, number, how, _ = ask_to_fork(connection, 1)
            assert (kind, number) == ("ended", 1)
            assert "too many open files" in how
        resource.prlimit(connection.pid, resource.RLIMIT_NOFILE, (most, most))
        assert ask_to_fork(connection, 2)[:2] == ["forked", 2]
    finally:
        connection.close()


def test_a_client_that_says_nonsense_is_left_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served_here(monkeypatch) as connection:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(connection.socket.getpeername())
            other.sendall(b"\x00\x00\x00\x02\xc1\xc1")
            assert other.recv(1) == b""
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, "exited with code 0"),
        (256, "exited with code 1"),
        (signal.SIGKILL, "killed by SIGKILL"),
        (40, "killed by signal 40"),
    ],
)
def test_every_end_of_a_process_has_a_description(status: int, expected: str) -> None:
    """Real-time signals have no names; a zygote that stumbled over one would be gone."""
    assert describe_exit(status) == expected


def test_what_a_zygote_dies_of_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*args: object) -> NoReturn:
        raise RuntimeError("something nobody has thought of")

    monkeypatch.setattr(zygote, "receive_request", break_down)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with served_here(monkeypatch) as connection:
        connection.request(["is current"])
        kind, text = SocketChannel(connection.socket).receive()
    assert kind == "dying"
    assert "RuntimeError: something nobody has thought of" in text


class Heard(Listener):
    """What an agent hears of its worker processes."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def process_lost(self, number: int, why: str) -> None:
        self.lost.set_result((number, why))


def test_an_agent_hears_what_its_zygote_has_died_of() -> None:
    async def listen() -> tuple[int, str]:
        spec = ZygoteSpec(name=f"\0{secrets.token_hex(8)}", environment={}, modules=(), path=())
        heard = Heard()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(spec.name)
            listener.listen()
            zygotes = ZygoteClient(spec, WORKER, listener=heard)
            await zygotes.connect()
            connection, _ = listener.accept()
            zygotes.fork(3, environment={}, directory="/", argv=[], descriptors=[])
            connection.sendall(pack(["dying", "MemoryError"]))
            connection.close()
            return await asyncio.wait_for(heard.lost, timeout=30)

    assert asyncio.run(listen()) == (3, "MemoryError")


DIES = """
import os, sys
open(sys.path[0] + "/fifo").read()
print("there is no room for this library", file=sys.stderr)
os.abort()
"""


def test_agents_hear_what_their_zygote_has_written_before_it_died(tmp_path: Path) -> None:
    """Both the one that started it and the others of its node."""

    async def listen() -> list[tuple[int, str]]:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "dies_when_imported.py").write_text(DIES)
        spec = ZygoteSpec(
            name=f"\0{secrets.token_hex(8)}",
            environment={},
            modules=("dies_when_imported",),
            path=(str(tmp_path), *sys.path),
        )
        heard = [Heard(), Heard()]
        zygotes = [ZygoteClient(spec, WORKER, listener=each) for each in heard]
        await zygotes[0].connect()
        fifo = await asyncio.to_thread(open, tmp_path / "fifo", "w")
        await zygotes[1].connect()
        with open(os.devnull, "r+b") as nothing:
            for attempt, each in enumerate(zygotes):
                each.fork(
                    attempt,
                    environment={},
                    directory="/",
                    argv=[],
                    descriptors=[nothing.fileno()] * 4,
                )
        fifo.close()
        async with asyncio.timeout(30):
            return [await each.lost for each in heard]

    for attempt, (of, why) in enumerate(asyncio.run(listen())):
        assert of == attempt
        assert "there is no room for this library" in why
        assert "Fatal Python error: Aborted" in why
        assert "dies_when_imported.py" in why


@pytest.mark.parametrize("call", ["pidfd_open", "memfd_create"])
def test_what_the_system_lacks_is_reported_before_anything_starts(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old kernels don't have it, and sandboxes refuse it."""
    assert list(system_problems()) == []
    monkeypatch.setattr(os, call, fails(errno.EPERM))
    with pytest.raises(InvalidJobError, match=rf"need {call}, .*not permitted.*num_workers=0"):
        make_trainer("reference", lambda: None, scaling_config=ScalingConfig(num_workers=1))


class Running:
    """Evaluates an expression in the worker process that is sent it as its order."""

    def __init__(self, expression: str) -> None:
        self._expression = expression

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (self._expression,)


@contextmanager
def bare_zygote(*modules: str, directory: Path | None = None) -> Iterator[ZygoteConnection]:
    """A connection to a new zygote that imports modules, if need be from a directory."""
    name = f"\0{secrets.token_hex(8)}"
    path = path_with(directory)
    spec = ZygoteSpec(name=name, environment={}, modules=modules, path=path)
    with closing(ZygoteConnection.open(spec)) as connection:
        yield connection


def zygote_that(start: str, directory: Path) -> AbstractContextManager[ZygoteConnection]:
    """A connection to a zygote whose workers are "forked" or "spawned"."""
    (directory / "starts_a_thread.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    modules = () if start == "forked" else ("starts_a_thread",)
    return bare_zygote(*modules, directory=directory)


@contextmanager
def zygote_with(module: str, *, by: str, directory: Path, entry: str) -> Iterator[ZygoteConnection]:
    """A connection to a zygote in which, or in whose preloaded one, a module is imported."""
    modules = (module,) if by == "the zygote" else ()
    with bare_zygote(*modules, directory=directory) as connection:
        if by == "the preloaded zygote":
            connection.request(["preload", entry, [module], {}, dict(os.environ), "/"])
            node = psutil.Process(connection.pid)
            assert eventually(lambda: any(map(is_serving, node.children())))
        yield connection


def path_with(directory: Path | None) -> tuple[str, ...]:
    return tuple(sys.path) if directory is None else (str(directory), *sys.path)


def run_in_worker(
    connection: ZygoteConnection, number: int, expression: str, **variables: str
) -> int:
    """Have a worker process that evaluates an expression; its process id."""
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(Page()) as page, open(os.devnull, "r+b") as nothing:
        order = pickle.dumps(Running(expression))
        ours.sendall(pack(["start", order, 0, "/"]))
        no_job = nothing.fileno()
        descriptors = [theirs.fileno(), *[nothing.fileno()] * 2, page.descriptor, no_job]
        connection.request(
            ["fork", number, {**os.environ, **variables}, "/", list(sys.path), [], WORKER],
            descriptors,
        )
        kind, answered, pid = SocketChannel(connection.socket).receive()
    assert (kind, answered) == ("forked", number)
    return int(pid)


PAUSE = "__import__('signal').pause()"


def in_background(file: Path) -> str:
    """An expression: start a process that outlives its parent, and write its id into a file."""
    command = f"sleep 600 & echo $! > {file}.new; mv {file}.new {file}"
    return f"__import__('os').system({command!r})"


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def test_orphans_of_a_living_worker_are_no_zombies(tmp_path: Path) -> None:
    """One `command &` a step would otherwise come up to the process limit."""
    file = tmp_path / "done"
    many = "[__import__('os').system('true & true & true &') for _ in range(10)]"
    with bare_zygote() as connection:
        run_in_worker(connection, 1, f"({many}, open({str(file)!r}, 'w').close(), {PAUSE})")
        assert eventually(file.exists)
        here = psutil.Process(connection.pid)
        assert eventually(lambda: len(here.children()) == 1)


def test_what_a_peer_has_in_the_background_lives_as_long_as_the_peer(tmp_path: Path) -> None:
    with bare_zygote() as connection:
        files = [tmp_path / "first", tmp_path / "second"]
        for number, file in enumerate(files):
            stays = f"({in_background(file)}, {PAUSE})"
            run_in_worker(connection, number, stays)
        assert eventually(lambda: all(file.exists() for file in files))
        first, second = (int(file.read_text()) for file in files)
        connection.request(["kill", 0])
        assert SocketChannel(connection.socket).receive()[:2] == ["ended", 0]
        assert has_ended(first)
        assert not has_ended(second)
        connection.request(["kill", 1])
        assert SocketChannel(connection.socket).receive()[:2] == ["ended", 1]
        assert has_ended(second)


def test_what_has_left_its_workers_session_goes_with_the_last_worker(tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    command = f"setsid sh -c 'echo $$ > {file}.new; mv {file}.new {file}; exec sleep 600' &"
    with bare_zygote() as connection:
        run_in_worker(connection, 0, f"(__import__('os').system({command!r}), {PAUSE})")
        run_in_worker(connection, 1, PAUSE)
        assert eventually(file.exists)
        daemon = int(file.read_text())
        for number in (1, 0):
            connection.request(["kill", number])
            assert SocketChannel(connection.socket).receive()[:2] == ["ended", number]
        assert has_ended(daemon)


SHARES = """
import multiprocessing, os, signal, sys
from multiprocessing.shared_memory import SharedMemory
used = SharedMemory({used!r})
made = SharedMemory(create=True, size=1)
lock = multiprocessing.get_context("spawn").Lock()
with open({file!r}, "w") as file:
    file.write(made.name + " sem." + lock._semlock.name[1:])
os.rename({file!r}, {file!r} + ".names")
signal.pause()
"""


@pytest.mark.parametrize("start", ["forked", "spawned", "forked by the preloaded zygote"])
def test_what_a_killed_worker_has_shared_under_a_name_goes_with_it(
    start: str, tmp_path: Path
) -> None:
    """The next attempt may use the same name, and the node's memory isn't endless."""
    file, drivers = tmp_path / "worker.names", Path(f"/dev/shm/{secrets.token_hex(8)}")
    drivers.write_bytes(b"d")
    with ExitStack() as stack:
        stack.callback(drivers.unlink)
        connection = stack.enter_context(
            zygote_that(start, tmp_path)
            if start in ("forked", "spawned")
            else zygote_with("csv", by="the preloaded zygote", directory=tmp_path, entry=WORKER)
        )
        code = SHARES.format(used=drivers.name, file=str(file.with_suffix("")))
        for number in range(2):
            run_in_worker(connection, number, f"exec({code!r}, {{}})")
            assert eventually(file.exists)
            made = [Path("/dev/shm", name) for name in file.read_text().split()]
            file.unlink()
            assert all(each.exists() for each in made)
            if number == 0:
                connection.request(["kill", number])
                assert SocketChannel(connection.socket).receive()[:2] == ["ended", number]
            else:
                connection.close()
            assert not any(each.exists() for each in made)
        assert drivers.exists()


CLIENT = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(chr(0) + sys.argv[1])
for done in ("connected", "left"):
    print(done, flush=True)
    sys.stdin.readline()
    connection.close()
"""


def test_what_has_ended_takes_no_new_worker_with_it() -> None:
    """Its descriptor may have a new worker's number when the zygote hears of its end."""
    with bare_zygote() as connection, ExitStack() as stack:
        assert connection.pid is not None
        name = connection.socket.getpeername()[1:].decode()
        # The worker's own descriptors take their numbers, and the number of the client.
        others = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(6)]
        for other in others:
            other.connect(connection.socket.getpeername())
        client = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == b"connected\n"
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]
        for other in others:
            other.close()
        os.kill(connection.pid, signal.SIGSTOP)
        client.stdin.write(b"\n")
        client.stdin.flush()
        assert client.stdout.readline() == b"left\n"
        with open(os.devnull, "r+b") as nothing:
            connection.request(
                ["fork", 1, {}, "/", list(sys.path), [], WORKER], [nothing.fileno()] * 5
            )
        client.communicate(b"\n")
        os.kill(connection.pid, signal.SIGCONT)
        channel = SocketChannel(connection.socket)
        assert channel.receive()[:2] == ["forked", 1]
        # It ends by itself: nobody talks to it.
        assert channel.receive() == ["ended", 1, "exited with code 1", False]


def end_of(
    connection: ZygoteConnection,
    directory: Path,
    entry: str,
    output: str = os.devnull,
    argv: tuple[str, ...] = (),
) -> Any:
    """Run a module's `main` in a worker process; how that has ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(Page()) as page, open(output, "wb") as file:
        connection.request(
            ["fork", 1, dict(os.environ), "/", [*path_with(directory)], [*argv], entry],
            [theirs.fileno(), *[file.fileno()] * 2, page.descriptor],
        )
        assert SocketChannel(connection.socket).receive()[:2] == ["forked", 1]
        kind, _, how, _ = SocketChannel(connection.socket).receive()
        assert kind == "ended"
        return how


def directories_of(owner: str, directory: Path) -> str:
    """Code that makes temporary directories: which are removed at an end, in each way there is."""
    named = f"dir={str(directory)!r}, prefix={owner + '-'!r}"
    return (
        f"first, second = (tempfile.TemporaryDirectory({named}) for _ in range(2))\n"
        "atexit.register(second.cleanup)\n"
        "for remove in (shutil.rmtree, functools.partial(shutil.rmtree, ignore_errors=True)):\n"
        f"    atexit.register(remove, tempfile.mkdtemp({named}))\n"
    )


@pytest.mark.parametrize("by", ["the zygote", "the preloaded zygote"])
def test_a_worker_leaves_what_its_zygote_owns(by: str, tmp_path: Path) -> None:
    """A library may make a directory when it is imported. All forks have the same."""
    site = tmp_path / "site-packages"
    site.mkdir()
    imports = "import atexit, functools, shutil, tempfile\n"
    (site / "of_library.py").write_text(imports + directories_of("library", tmp_path))
    (site / "of_worker.py").write_text(
        f"{imports}import of_library\n"
        "def main(connection, others):\n"
        f"    exec({directories_of('worker', tmp_path)!r}, globals())\n"
        "    return 0\n"
    )

    def owners() -> list[str]:
        found = [each.name.partition("-")[0] for each in tmp_path.iterdir() if each != site]
        return sorted(found)

    with zygote_with("of_library", by=by, directory=site, entry="of_worker") as connection:
        assert end_of(connection, site, "of_worker") == "exited with code 0"
        assert owners() == ["library"] * 4
    assert eventually(lambda: owners() == [])


WRITES = """
import has_stream
def main(connection, others):
    print("a line", file=has_stream.stdout)
    print("and more", file=has_stream.stdout, end="")
    return 0
"""


def test_what_is_written_to_a_stream_that_a_library_has_imported_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As default values of its functions, `file=sys.stdout`, are."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "writes.py").write_text(WRITES)
    (tmp_path / "has_stream.py").write_text("from sys import stdout\nprint('imported')\n")
    output = tmp_path / "output"
    with bare_zygote("has_stream", directory=tmp_path) as connection:
        assert end_of(connection, tmp_path, "writes", str(output)) == "exited with code 0"
    assert output.read_text() == "a line\nand more"


PRINTS = """
import os, signal, sys
def main(connection, others):
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        print("\\xe9 \\udcff", file=stream)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start", ["forked", "spawned"])
def test_a_worker_can_print_any_text(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's terminal may know ASCII alone, and a file's name be no text.

    Each line is there at once, also those of a library that writes to the first streams.
    """
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "prints.py").write_text(PRINTS)
    output = tmp_path / "output"
    with zygote_that(start, tmp_path) as connection:
        assert "SIGKILL" in end_of(connection, tmp_path, "prints", str(output))
    assert output.read_text() == "\xe9 \\udcff\n" * 4


DRAWS = """
import os, random, own_generators
def main(connection, others):
    drawn = (each.random() for each in (random, own_generators.free, own_generators.fixed))
    with open(os.path.join(os.path.dirname(__file__), "drawn"), "a") as file:
        print(*drawn, file=file)
    return 0
"""


@pytest.mark.parametrize("by", ["the zygote", "the preloaded zygote"])
def test_a_librarys_own_random_numbers_differ_between_workers(by: str, tmp_path: Path) -> None:
    """It names files with them, which would be another worker's. A seed is the same in all."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "draws.py").write_text(DRAWS)
    (site / "own_generators.py").write_text(
        "import random\nfree, fixed = random.Random(), random.Random(7)\n"
    )
    with zygote_with("own_generators", by=by, directory=site, entry="draws") as connection:
        for _ in range(2):
            assert end_of(connection, site, "draws") == "exited with code 0"
    drawn = zip(*map(str.split, (site / "drawn").read_text().splitlines()), strict=True)
    assert [len({*of_generator}) for of_generator in drawn] == [2, 2, 1]


INTERRUPTED = """
import signal, sys
def main(connection, others):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return len(sys.argv)
    return 0
"""

MANY_FILES = ("x" * 2000,) * 100
"""A command line that has room for as much as this, of which no argument has room for all."""


@pytest.mark.parametrize("start", ["forked", "spawned"])
def test_an_interrupt_is_raised_in_a_worker_as_in_any_program(start: str, tmp_path: Path) -> None:
    """Libraries send it to their own process: a tracker does when a user stops its run there.

    It has the driver's arguments, however many files they name.
    """
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    with zygote_that(start, tmp_path) as connection:
        how = end_of(connection, tmp_path, "interrupted", argv=MANY_FILES)
        assert how == "exited with code 100"


def test_modules_are_found_in_a_directory_that_is_newer_than_the_zygote(tmp_path: Path) -> None:
    later = tmp_path / "later"
    with bare_zygote("looked_for_everywhere", directory=later) as connection:
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]
        later.mkdir()
        (later / "is_new.py").write_text("def main(connection, others):\n    return 7\n")
        assert end_of(connection, later, "is_new") == "exited with code 7"


def test_a_large_environment_does_not_wait_for_a_zygote_that_imports(tmp_path: Path) -> None:
    """An agent does nothing else meanwhile: it kills nobody, and says nothing of its state."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow_to_import.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    spec = ZygoteSpec(
        name=f"\0{secrets.token_hex(8)}",
        environment={},
        modules=("slow_to_import",),
        path=(str(tmp_path), *sys.path),
    )
    connection = ZygoteConnection.open(spec)
    environment = {**os.environ, **{f"LARGE_{number}": "x" * 20_000 for number in range(100)}}
    request: list[object] = ["fork", 3, environment, "/", list(sys.path), [], WORKER]
    with open(os.devnull, "r+b") as nothing:
        descriptors = [nothing.fileno()] * 4
        asking = threading.Thread(target=connection.request, args=(request, descriptors))
        asking.start()
        asking.join(timeout=10)
        is_waiting = asking.is_alive()
        (tmp_path / "fifo").write_text("go on")
        asking.join(timeout=30)
    try:
        assert not is_waiting
        kind, number, *_ = SocketChannel(connection.socket).receive()
        assert (kind, number) == ("forked", 3)
    finally:
        connection.close()


def test_a_worker_process_has_its_large_environment(tmp_path: Path) -> None:
    file = tmp_path / "written"
    found = f"open({str(file)!r}, 'w').write(__import__('os').environ['LARGE'][-3:])"
    with bare_zygote() as connection:
        run_in_worker(connection, 1, found, LARGE="x" * 100_000 + "end")
        assert eventually(lambda: file.exists() and file.read_text() == "end", seconds=30)


def test_too_many_files_for_a_large_request_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    received = socket.recv_fds

    def truncated(*args: Any) -> Any:
        header, descriptors, flags, address = received(*args)
        for descriptor in descriptors:
            os.close(descriptor)
        return header, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(socket, "recv_fds", truncated)
    monkeypatch.setenv("LARGE", "x" * 100_000)
    with served_here(monkeypatch) as connection:
        kind, number, how, _ = ask_to_fork(connection, 5)
    assert (kind, number, how) == ("ended", 5, "could not be started: too many open files")


DRIVER_WITH_A_CHILD = """
import os, signal, sys, time
from polytrain.workers.processes.zygote_connection import ZygoteConnection, ZygoteSpec
sys.path.insert(0, sys.argv[2])
from tests.unit.workers.processes.test_zygote import PAUSE, run_in_worker

spec = ZygoteSpec(name=chr(0) + sys.argv[1], environment={}, modules=(), path=tuple(sys.path))
connection = ZygoteConnection.open(spec)
worker = run_in_worker(connection, 1, PAUSE)
# As a library without Python does, of which nobody hears that it forks.
kept = os.dup(connection.socket.fileno())
child = os.fork()
if child == 0:
    signal.pause()
print(worker, child, flush=True)
signal.pause()
"""


def test_a_killed_drivers_workers_end_though_a_child_of_it_lives() -> None:
    """The child may have the driver's connection to the zygote open, for as long as it lives."""
    root = str(Path(__file__).parents[4])
    script = [sys.executable, "-c", DRIVER_WITH_A_CHILD, secrets.token_hex(8), root]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        worker, child = map(int, driver.stdout.readline().split())
        driver.kill()
    try:
        assert eventually(lambda: has_ended(worker))
        assert not has_ended(child)
    finally:
        os.kill(child, signal.SIGKILL)


def another_client(first: ZygoteConnection) -> ZygoteConnection:
    name = first.socket.getpeername().decode()
    return ZygoteConnection.open(ZygoteSpec(name=name, environment={}, modules=(), path=()))


def is_serving(preloaded: psutil.Process) -> bool:
    """Whether it waits for requests. Before, it has closed what it got from the node's zygote."""
    files = opened(preloaded.pid).values()
    return "anon_inode:[eventpoll]" in files and "anon_inode:[pidfd]" not in files


def test_the_preloaded_zygote_forks_for_all_clients_and_another_follows_it() -> None:
    """Clients number their worker processes themselves: two may have the same number."""
    with bare_zygote() as first:
        second = another_client(first)
        first.request(["preload", WORKER, ["csv"], {}, dict(os.environ), "/"])
        node = psutil.Process(first.pid)
        assert eventually(lambda: any(map(is_serving, node.children())))
        [preloaded] = node.children()
        pids = [run_in_worker(client, 1, PAUSE) for client in (first, second)]
        assert {process.pid for process in preloaded.children()} == set(pids)
        for _ in range(2):
            # The second time it may be dying, which isn't its own doing.
            first.request(["kill", 1])
        assert SocketChannel(first.socket).receive() == ["ended", 1, "killed by SIGKILL", True]
        assert not has_ended(pids[1])
        preloaded.kill()
        assert SocketChannel(second.socket).receive() == ["ended", 1, "its zygote died", False]
        assert has_ended(pids[1])
        last = run_in_worker(second, 2, PAUSE)
        assert [process.pid for process in node.children()] == [last]
        second.leave()
        # What a client leaves behind is killed.
        assert eventually(lambda: has_ended(last))


def test_workers_of_the_preloaded_zygote_end_with_their_client() -> None:
    with bare_zygote() as first:
        second = another_client(first)
        first.request(["preload", WORKER, ["csv"], {}, dict(os.environ), "/"])
        node = psutil.Process(first.pid)
        assert eventually(lambda: any(map(is_serving, node.children())))
        pids = [run_in_worker(client, 1, PAUSE) for client in (first, second)]
        second.leave()
        assert eventually(lambda: has_ended(pids[1]))
        assert not has_ended(pids[0])
