"""What a storage says of itself in passing is asked again; what won't change is not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import io
import logging
import math
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs as pafs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.storage import calls
from polytrain.storage.beneath import ForeignFileError
from polytrain.storage.calls import StorageHealth, answered, at_once, retries_limited, retry
from polytrain.storage.location import Location
from polytrain.storage.remote import RemoteStorage

PASSING = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    OSError(errno.ETIMEDOUT, "Connection timed out"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    TimeoutError("the read operation timed out"),
    OSError("When writing: AWS Error SLOW_DOWN during PutObject operation: Reduce your rate."),
    OSError("When reading: AWS Error UNKNOWN (HTTP status 503) during GetObject operation"),
    OSError("When listing: AWS Error NETWORK_CONNECTION during ListObjectsV2: curlCode: 7"),
]

HOPELESS = [
    OSError(errno.EROFS, "Read-only file system"),
    OSError(errno.EFBIG, "File too large"),
    OSError(errno.ENAMETOOLONG, "File name too long"),
    PermissionError(errno.EACCES, "Permission denied"),
    PermissionError(errno.EPERM, "Operation not permitted"),
    PermissionError("said without a number"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    FileNotFoundError("said without a number"),
    FileExistsError(errno.EEXIST, "File exists"),
    IsADirectoryError(errno.EISDIR, "Is a directory"),
    NotADirectoryError(errno.ENOTDIR, "Not a directory"),
    OSError("When reading: AWS Error ACCESS_DENIED during HeadObject operation: No response body."),
    OSError("AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2 operation"),
    OSError("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload operation"),
    ValueError("a mistake of the caller"),
    KeyboardInterrupt(),
]


@dataclass
class Clock:
    """Time that passes when somebody waits."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@contextmanager
def a_clock() -> Iterator[Clock]:
    """The clock that retries go by."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polytrain.storage.calls.time", clock)
        yield clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    with a_clock() as clock:
        yield clock


class Storage:
    """Raises these errors, one after another, and then works."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "content"


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_a_passing_error_is_waited_out(clock: Clock, error: OSError) -> None:
    storage = Storage(error, error, error)
    assert retry(storage, retry_s=600, what="s3://bucket") == "content"
    assert storage.calls == 4
    assert clock.waits


@pytest.mark.parametrize("error", HOPELESS, ids=repr)
def test_an_error_that_stays_is_reported_at_once(
    clock: Clock, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    storage = Storage(error)
    with pytest.raises(type(error)) as caught:
        retry(storage, retry_s=600, what="s3://bucket")
    assert caught.value is error
    assert storage.calls == 1
    assert clock.waits == []
    assert caplog.records == [], "nobody is told of an attempt that isn't made"


def test_a_full_disk_is_not_filled_again_and_again(clock: Clock) -> None:
    """Each try may write a whole checkpoint, and take the room that others need."""
    full = [OSError(errno.ENOSPC, "No space left on device")] * 1000
    storage = Storage(*full)
    with pytest.raises(OSError, match="No space left"):
        retry(storage, retry_s=600, what="s3://bucket", is_costly=True)
    assert storage.calls < 30
    assert 500 < clock.now <= 600
    storage = Storage(*full[:3])
    began = clock.now
    assert retry(storage, retry_s=600, what="s3://bucket", is_costly=True) == "content"
    assert clock.now - began < 10


def test_a_limit_that_changes_ends_a_long_pause(clock: Clock) -> None:
    """Such as that of a program that is asked to end."""

    def limit_s() -> float:
        return 5.0 if clock.now > 100 else math.inf

    full = [OSError(errno.ENOSPC, "No space left on device")] * 1000
    with pytest.raises(OSError, match="No space left"):
        retry(Storage(*full), retry_s=600, what="disk", is_costly=True, limit_s=limit_s)
    assert 100 < clock.now < 101


REFUSED = [
    error
    for error in HOPELESS
    if isinstance(error, OSError) and ("denied" in str(error) or "Read-only" in str(error))
] + [OSError("AWS Error INVALID_ACCESS_KEY_ID during PutObject"), PermissionError("expired")]


@pytest.mark.parametrize("error", REFUSED, ids=repr)
def test_access_that_was_there_for_a_while_is_waited_for(
    clock: Clock, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    """A ticket or a key is renewed late, or a disk that had an error is mounted anew."""
    health = StorageHealth()
    retry(Storage(), retry_s=600, what="s3://bucket", health=health)
    clock.now += 59
    with pytest.raises(OSError, match=str(error).rpartition("]")[2].strip()):
        retry(Storage(error), retry_s=600, what="s3://bucket", health=health)
    clock.now += 2
    storage = Storage(error, error)
    assert retry(storage, retry_s=600, what="s3://bucket", health=health) == "content"
    assert storage.calls == 3
    [message] = caplog.messages
    assert message.endswith("Trying again for up to 600 s. Restore the access meanwhile.")
    assert_is_no_access(health)


def assert_is_no_access(health: StorageHealth) -> None:
    """Neither a link in a file's place nor a missing one is about access."""
    for error in (ForeignFileError("a symbolic link"), FileNotFoundError(errno.ENOENT, "none")):
        storage = Storage(error)
        with pytest.raises(type(error)):
            retry(storage, retry_s=600, what="s3://bucket", health=health)
        assert storage.calls == 1


def test_an_error_that_stays_ends_the_wait_for_one_that_passes(clock: Clock) -> None:
    storage = Storage(PASSING[0], PASSING[1], HOPELESS[0])
    with pytest.raises(OSError, match="Read-only"):
        retry(storage, retry_s=600, what="s3://bucket")
    assert storage.calls == 3


def test_without_patience_there_is_one_attempt(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(PASSING[0])
    with pytest.raises(OSError, match="Input/output error"):
        retry(storage, retry_s=0, what="s3://bucket")
    assert storage.calls == 1
    assert caplog.records == []


def test_a_program_that_wants_to_end_repeats_nothing_any_more(clock: Clock) -> None:
    errors = [OSError(f"error {number}") for number in range(1000)]
    storage = Storage(*errors)

    def limit_s() -> float:
        return 0 if storage.calls >= 3 else 1000

    with retries_limited(limit_s), pytest.raises(OSError, match="error 2"):
        retry(storage, retry_s=600, what="s3://bucket")
    assert storage.calls == 3
    assert retry(Storage(*errors[:5]), retry_s=600, what="s3://bucket") == "content"


def test_a_name_that_the_storage_cannot_have_is_not_tried_again(clock: Clock) -> None:
    storage = RemoteStorage(pafs._MockFileSystem(), "run", root="mock://run", retry_s=600)
    with pytest.raises(UnicodeEncodeError):
        storage.write(b"model-\xff".decode(errors="surrogateescape"), b"content")
    assert clock.waits == []


def test_a_file_that_is_too_large_for_s3_is_not_sent(clock: Clock, tmp_path: Path) -> None:
    filesystem = SimpleNamespace(type_name="s3")
    storage = RemoteStorage(filesystem, "run", root="s3://run", retry_s=600)
    with open(tmp_path / "model", "wb") as file:
        file.truncate(10_000 * (10 << 20) + 1)
    with pytest.raises(OSError, match="Divide it into several files") as caught:
        storage.put(tmp_path / "model", "checkpoints/model", move=False)
    assert caught.value.errno == errno.EFBIG
    assert clock.waits == []


def test_an_answer_that_a_client_cannot_decode_is_asked_for_again(clock: Clock) -> None:
    answers = iter([lambda: b"\xff".decode(), io.BytesIO])
    filesystem = SimpleNamespace(type_name="s3", open_output_stream=lambda path: next(answers)())
    storage = RemoteStorage(filesystem, "run", root="s3://run", retry_s=600)
    storage.write("model", b"content")
    assert clock.waits


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (OSError("AWS Error ACCESS_DENIED during DeleteObjects operation"), ["all"]),
        (OSError("AWS Error ExpiredToken during DeleteObjects operation"), ["all"]),
        (TimeoutError("no answer"), ["all"]),
        (OSError("AWS Error UNKNOWN (HTTP status 501) during DeleteObjects"), ["all", "list"]),
    ],
)
def test_files_are_deleted_singly_only_if_the_service_lacks_the_call_for_many(
    error: OSError, calls: list[str]
) -> None:
    made = []

    def delete_dir(path: str) -> None:
        made.append("all")
        raise error

    def get_file_info(selector: Any) -> list[Any]:
        made.append("list")
        return []

    filesystem = SimpleNamespace(type_name="s3", delete_dir=delete_dir, get_file_info=get_file_info)
    storage = RemoteStorage(filesystem, "run", root="s3://run", retry_s=0)
    with contextlib.suppress(OSError):
        storage.delete_below("checkpoint")
    assert made == calls


def never(clock: Clock) -> Storage:
    return Storage(*(OSError(f"error {number}") for number in range(10_000)))


def test_a_storage_that_has_failed_for_its_time_is_tried_once_by_each_call(clock: Clock) -> None:
    health, dead = StorageHealth(), never(clock)
    for _ in range(6):
        with pytest.raises(OSError, match="error"):
            retry(dead, retry_s=60, what="s3://bucket", health=health)
    # All six together take the time of one.
    assert 45 <= clock.now <= 60
    calls = dead.calls
    with pytest.raises(OSError, match="error"):
        retry(dead, retry_s=60, what="s3://bucket", health=health)
    assert dead.calls == calls + 1
    # Another storage has a health of its own.
    assert retry(Storage(*PASSING), retry_s=600, what="s3://other") == "content"


@pytest.mark.parametrize("answer", [Storage(), Storage(FileNotFoundError("no such key"))])
def test_an_answer_makes_a_storage_healthy_again(clock: Clock, answer: Storage) -> None:
    health = StorageHealth()
    with pytest.raises(OSError, match="error"):
        retry(never(clock), retry_s=60, what="s3://bucket", health=health)
    with suppress(FileNotFoundError):
        retry(answer, retry_s=0, what="s3://bucket", health=health)
    assert retry(Storage(*PASSING), retry_s=600, what="s3://bucket", health=health) == "content"


def test_a_call_without_patience_says_nothing_about_the_storage(clock: Clock) -> None:
    """A heartbeat that is late is useless: one that fails is no outage."""
    health = StorageHealth()
    with pytest.raises(OSError, match="error"):
        retry(never(clock), retry_s=0, what="s3://bucket", health=health)
    assert retry(Storage(*PASSING), retry_s=600, what="s3://bucket", health=health) == "content"


def test_a_call_within_a_call_doesnt_wait_again(clock: Clock) -> None:
    health, dead = StorageHealth(), never(clock)

    def outer() -> str:
        return retry(dead, retry_s=60, what="s3://bucket", health=health)

    with pytest.raises(OSError, match="error"):
        retry(outer, retry_s=60, what="checkpoint", health=health)
    assert clock.now <= 60


def test_a_signal_shortens_the_wait_of_a_call_that_sleeps(clock: Clock) -> None:
    is_asked = False

    def limit_s() -> float:
        return 10 if is_asked else math.inf

    def call() -> None:
        nonlocal is_asked
        is_asked = clock.now > 100
        raise OSError("out")

    health = StorageHealth()
    with retries_limited(limit_s), pytest.raises(OSError, match="out"):
        retry(call, retry_s=600, what="s3://bucket", health=health)
    assert 100 < clock.now <= 120
    # What is stored afterwards waits no longer.
    before = clock.now
    with pytest.raises(OSError, match="out"):
        retry(call, retry_s=600, what="s3://bucket", health=health)
    assert clock.now == before


def test_a_program_that_wants_to_end_leaves_a_silent_storage_alone() -> None:
    """The client of an object storage would wait for its answer for ten seconds and more."""
    is_called, is_released = threading.Event(), threading.Event()
    calls: list[str] = []

    def silent(path: str) -> None:
        calls.append(path)
        is_called.set()
        is_released.wait()
        raise OSError("Operation too slow")

    filesystem = SimpleNamespace(type_name="s3", open_output_stream=silent, delete_file=silent)
    storage = RemoteStorage(filesystem, "bucket/run", root="s3://bucket/run", retry_s=600)
    try:
        with retries_limited(lambda: 0 if is_called.is_set() else math.inf):
            for path in ("journal", "log"):
                with pytest.raises(TimeoutError, match="s3://bucket/run doesn't answer"):
                    storage.write(path, b"content")
            with pytest.raises(TimeoutError, match="doesn't answer"):
                storage.create("lease", b"content")
        assert calls[:2] == ["bucket/run/journal", "bucket/run/log"]
    finally:
        is_released.set()


def test_an_upload_gets_the_time_that_its_size_needs() -> None:
    is_late = threading.Event()

    def upload() -> str:
        is_late.wait()
        return "content"

    def limit_s() -> float:
        # Asked while the answer is awaited.
        is_late.set()
        return 0

    health = StorageHealth()
    with retries_limited(limit_s):
        for size in (10**12, math.inf):
            is_late.clear()
            assert answered(upload, what="s3://bucket", health=health, size=size) == "content"
    assert not health.has_failed


def test_a_call_that_is_under_way_gets_its_time_from_when_the_program_is_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_answered, now = threading.Event(), [0.0]
    monkeypatch.setattr("polytrain.storage.calls.time", SimpleNamespace(monotonic=lambda: now[0]))
    limits = iter([math.inf, math.inf, 5.0, 5.0])

    def slow() -> str:
        is_answered.wait()
        return "content"

    def limit_s() -> float:
        limit = next(limits, None)
        now[0] += 100 if limit == math.inf else 1
        if limit is None:
            is_answered.set()
        return 5.0 if limit is None else limit

    health = StorageHealth()
    with retries_limited(limit_s):
        assert answered(slow, what="s3://bucket", health=health) == "content"
    assert not health.has_failed


def test_threads_that_wait_already_stop_when_one_has_waited_in_vain() -> None:
    """The real clock: the others would sleep for seconds yet."""
    health, is_out = StorageHealth(), threading.Event()

    def out() -> None:
        is_out.set()
        raise OSError("out")

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(retry, out, retry_s=600, what="part", health=health)
        is_out.wait()
        with pytest.raises(OSError, match="out"):
            retry(out, retry_s=0.1, what="journal", health=health)
        assert isinstance(waiting.exception(timeout=60), OSError)


def test_all_locations_of_a_run_share_its_storages_health(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    run = replace(location.below("run"), retry_s=0)
    assert run.health is location.health
    # It is no part of the place; and another process finds out for itself.
    location.health.has_failed = True
    assert location == Location.of(tmp_path)
    assert not pickle.loads(pickle.dumps(location)).health.has_failed


def test_the_last_error_is_what_is_raised(clock: Clock) -> None:
    errors = [OSError(f"error {number}") for number in range(1000)]
    storage = Storage(*errors)
    with pytest.raises(OSError, match="error ") as caught:
        retry(storage, retry_s=100, what="s3://bucket")
    assert caught.value is errors[storage.calls - 1]
    assert clock.now <= 100


def test_the_user_is_told_once_what_is_waited_for(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="polytrain")
    errors = [OSError(f"error {number}") for number in range(20)]
    retry(Storage(*errors), retry_s=600, what="Storage s3://bucket")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "Storage s3://bucket: error 0. Trying again for up to 600 s."


@given(out_s=st.floats(0, 1000), retry_s=st.floats(0, 1000))
def test_an_outage_within_the_patience_is_survived(out_s: float, retry_s: float) -> None:
    with a_clock() as clock:

        def call() -> Any:
            if clock.now < out_s:
                raise ConnectionRefusedError("out")
            return "content"

        try:
            retry(call, retry_s=retry_s, what="s3://bucket")
        except ConnectionRefusedError:
            # Nobody sleeps past the end only to give up there.
            assert out_s > retry_s - 15
        else:
            assert out_s == 0 or clock.now < retry_s
        assert clock.now <= max(0.0, retry_s)
        assert all(wait <= 0.5 for wait in clock.waits), "others' answers are noticed soon"
        assert clock.waits[:1] <= [0.2], "a hiccup costs no more than a moment"


def test_a_program_that_ends_waits_for_none_of_several_calls() -> None:
    """The storage may never answer them."""
    assert list(at_once(lambda _: threading.current_thread().daemon, range(3))) == [True] * 3


def test_when_one_call_has_failed_those_under_way_end_and_no_other_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dead storage would keep each of thousands for as long as the first."""
    is_waiting = threading.Event()
    begun: list[int] = []
    over: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise OSError("no answer")
        assert is_waiting.wait(timeout=60)
        over.append(number)

    def wait(futures: set[Future[None]]) -> None:
        is_waiting.set()
        concurrent.futures.wait(futures)

    monkeypatch.setattr(calls, "wait", wait)
    with pytest.raises(OSError, match="no answer"):
        list(at_once(call, range(500)))
    assert sorted(over) == sorted(begun)[1:]
    assert len(begun) < 50


def test_the_system_may_refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    own, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        own(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert list(at_once(str, range(3))) == ["0", "1", "2"]
