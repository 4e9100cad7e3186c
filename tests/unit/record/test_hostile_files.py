"""Every field of every file that is read from a run, with whatever somebody may have put there.

Each is refused by an error of ours, or is harmless: no other exception, no endless work, and
nothing outside of the run is read or written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tests.sweeps import examples
from tests.unit.checkpoint.test_manifest import MANIFEST
from tests.unit.prediction.test_prediction_record import RECORD
from tests.unit.record.recorded import CONFIGURATION, LOST, line

import polytrain
from polytrain import CheckpointConfig, PolytrainError
from polytrain.api.result import recorded
from polytrain.backends.reference import Reference
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.manifest import FORMAT as MANIFEST_FORMAT
from polytrain.checkpoint.manifest import differences as file_differences
from polytrain.checkpoint.manifest import parse_manifest
from polytrain.data.plan.position import DataPosition, StreamPosition
from polytrain.data.plan.row_plan import Plan
from polytrain.errors import DamagedFileError
from polytrain.functions.return_values import Returned, from_bytes, to_bytes
from polytrain.policy.retention import ranked
from polytrain.prediction.record import record_from_json, record_problems
from polytrain.record.entries import FORMAT
from polytrain.record.history import JOURNAL, entries, read_as
from polytrain.record.progress import Progress
from polytrain.record.reports import Reports, encoded_numbers
from polytrain.run.identity import content_differences, differences, options_of
from polytrain.run.lease import holder
from polytrain.run.requests import NoAnswerError, RemoteRequests, RequestKind, ask
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain.text import strict_json
from polytrain.trackers import CSV, WandB
from polytrain.trackers.rows import Position, TrackedRows
from polytrain.trackers.state import TrackerState, kept_state, kept_trackers, lags
from polytrain.trackers.tracker import numbers
from polytrain.view.cli.following import tail_of
from polytrain.view.cli.job_file import JobFileError, arguments_of, job_of
from polytrain.view.cli.run_text import facts as shown_facts
from polytrain.view.cli.run_text import run_lines
from polytrain.view.page.facts import Source, facts_of
from polytrain.view.page.reading import read_facts
from polytrain.view.page.rendering import page
from polytrain.view.present import PresentRun, RunRecord
from polytrain.view.run_state import RunState

pytestmark = pytest.mark.sweep

HOSTILE = {
    "a link": '"requests"',
    "the parent": '".."',
    "out of the run": '"../../../etc/passwd"',
    "absolute": '"/etc/passwd"',
    "a glob": '"*"',
    "a URL": '"http://mlflow.invalid/?token=x"',
    "a NUL": '"a\\u0000b"',
    "escape sequences": '"\\u001b]0;title\\u0007\\u001b[2J"',
    "half a character": '"\\udcff"',
    "much text": f'"{"x" * 200_000}"',
    "nothing": '""',
    "null": "null",
    "true": "true",
    "a list": "[]",
    "a list of lists": '[[[["x"]]]]',
    "an object": "{}",
    "an object of objects": '{"x": {"": {"y": [{}]}}}',
    "negative": "-1",
    "a fraction": "0.5",
    "more than 64 bits": str(2**64),
    "much more": str(10**400),
    "more digits than Python reads": "9" * 5000,
    "a number of ranks": str(10**12),
    "NaN": "NaN",
    "infinity": "-Infinity",
    "too large a float": "1e999",
    "a large float": "1e300",
    "levels": "[" * 300 + "]" * 300,
    "levels of objects": '{"a":' * 300 + "1" + "}" * 300,
    "levels beyond the stack": "[" * 100_000 + "]" * 100_000,
}
"""What it is → as JSON."""

OWN_FILES = (Path(polytrain.__file__).parent, Path(sys.prefix))

ONE_IN = examples(1, in_test=4)

PLACEHOLDER = "a value to be replaced"


def fields_in(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each value inside a value, containers included."""
    if path:
        yield path
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        # The others are alike.
        inner = [(0, value[0])] if value else []
    for key, each in inner:
        yield from fields_in(each, (*path, key))


def with_json(value: Any, path: tuple[str | int, ...], replacement: str) -> str:
    """Return a value as JSON, with other JSON at one place: what the value has there is lost.

    Raises:
        LookupError, TypeError: there is no such place.
    """
    *before, last = path
    inner = value
    for key in before:
        inner = inner[key]
    _, inner[last] = inner[last], PLACEHOLDER
    return json.dumps(value).replace(json.dumps(PLACEHOLDER), replacement)


def changed(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong at a place, with the JSON of all."""
    *before, last = path
    whole = json.loads(json.dumps(value))
    inner = whole
    for key in before:
        inner = inner[key]
    kept = json.dumps(inner[last])
    for what, hostile in HOSTILE.items():
        yield what, with_json(whole, path, hostile)
    if isinstance(inner, dict):
        # The last one counts.
        yield "twice", with_json(whole, path, f'[{{"x": 1}}], {json.dumps(last)}: {kept}')
    del inner[last]
    yield "left out", json.dumps(whole)


def wrong(
    value: Any, read: Callable[[bytes], None], allowed: tuple[type[Exception], ...]
) -> list[str]:
    """Read a file with each hostile value in each field; return what raised something else."""
    found = []
    json_of = json.dumps(value)
    read(json_of.encode())
    for number, path in enumerate(fields_in(json.loads(json_of))):
        # In `make test` one in so many, other ones in the next field.
        for what, text in islice(changed(json.loads(json_of), path), number % ONE_IN, None, ONE_IN):
            try:
                read(text.encode(errors="surrogatepass"))
            except allowed as error:
                if not str(error).isprintable() and "\n" not in str(error):
                    found.append(f"{path}: {what}: the error can't be printed: {error!r}"[:300])
            except Exception as error:
                found.append(f"{path}: {what}: {type(error).__name__}: {error}"[:300])
    return found


IDENTITY = {
    "backend": "reference",
    "training function": True,
    "options": {"rounds": 3},
    "datasets": {"train": {"shuffle": False, "seed": 0}},
    "content": {
        "python": "3.11",
        "train_loop_per_worker": "1234",
        "train_loop_config": {"lr": 0.5},
        "objects": {"loss": "12"},
        "transforms": {"train": None},
        "datasets": {"train": {"number of rows": "56"}},
        "restore_from": "/pretrained",
    },
}

STOPPED = {"by": "condition", "reason": "r", "condition": "c", "metric": "m", "step": 2, "value": 1}


def many(**more: Any) -> dict[str, Any]:
    reports = Reports()
    for step in range(4, 20):
        reports.add(step, {"loss": 0.5, "n": step, "text": "x"})
    written = json.loads(strict_json.dumps(reports.to_json()))
    times = encoded_numbers(array("d", [5.0] * 16))
    return line(
        5, "Reports", n=3, times=times, stalled_s=[[3, 0.5]], copied_s=[[4, 0.5]], **more, **written
    )


ENTRIES: tuple[dict[str, Any], ...] = (
    line(
        0,
        "Opened",
        format=FORMAT,
        anew=True,
        identity=IDENTITY,
        world_size=2,
        began=0.0,
        ranking=["loss", "min"],
        total_steps=9,
        time_budget_s=60.0,
        stop_function="f",
        configuration={**CONFIGURATION, "datasets": {"train": {"rows": 3, "num_columns": 1}}},
    ),
    line(1, "AgentsPlaced", phase="Gathering", attempt=0, reason="placed"),
    line(1, "Launched", attempt=0, step=0, start=None, world_size=2, hosts=["a", "b"], gpus=[0, 1]),
    line(1, "Started", attempt=0),
    line(
        1,
        "Joined",
        phase="Training",
        attempt=0,
        reason="joined",
        rank=1,
        rows={"train": 3},
        device="CPU",
        node="n",
    ),
    line(
        2,
        "Reported",
        n=0,
        step=1,
        metrics={"loss": 0.5, "deep": {"a": 1}},
        stalled_s=0.25,
        copied_s=0.5,
    ),
    line(2, "Reported", rank=1, n=0, step=1, metrics={"loss": 0.5}),
    line(3, "Reported", n=1, step=2, metrics={"loss": 0.25}),
    line(3, "Reported", n=2, step=3, metrics={"loss": 0.25}),
    line(3, "ValidationRequested", checkpoint="checkpoint_000000-1.0", step=3, task={}),
    line(
        3,
        "ValidationRequested",
        checkpoint="checkpoint_000001-1.0",
        step=3,
        task={"fn_kwargs": {"a": 1}, "timeout_s": 5.0},
    ),
    line(3, "Committed", checkpoint="checkpoint_000000-1.0", step=3),
    line(
        4,
        "ValidationEnded",
        checkpoint="checkpoint_000000-1.0",
        step=3,
        status="validated",
        metrics={"auc": 0.5},
        reason="",
        traceback="",
    ),
    line(4, "PartVoid", attempt=0, checkpoint=1, rank=1, reason="r"),
    line(
        4,
        "Load",
        attempt=0,
        window=0,
        busy=[0.5, 1.0],
        gpus=[[], [[0.9, 7], [None, 2]]],
        cpu=[2.5, 0.5],
        memory=[5, 6],
    ),
    line(4, "Straggler", attempt=0, rank=1, host="b", reason="slow"),
    line(4, "StacksDumped", attempt=0, reason="hangs", stacks={"0": "a", "1": "b"}),
    many(),
    many(rank=1),
    line(6, "Exited", phase="Ending", attempt=0, reason="rank 1", since_s=0.5),
    line(6, "ConditionMet", attempt=0, stopped=STOPPED),
    line(6, "DrainWanted", phase="Training", attempt=0, reason="r"),
    line(6, "AttemptEnded", attempt=0, failure=LOST, reason="failure 1 of 1"),
    line(7, "Launched", attempt=1, step=3, start="c", world_size=2, hosts=["a", "b"], gpus=[0, 0]),
    line(8, "Returned", file="return_values-000001.msgpack"),
    line(
        9,
        "Concluded",
        succeeded=False,
        stopped=STOPPED,
        reason="all ranks are done",
        code={
            "train_loop_per_worker": "12",
            "objects": {"loss": "3"},
            "transforms": {"train": None},
        },
    ),
    line(9, "Closed"),
)


class Outside(Exception):
    """Something outside of the run is asked for."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory. To open what is outside of it is an error."""
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    opened = Path.open

    def checking(self: Path, *arguments: Any, **more: Any) -> Any:
        # The page's scripts are beside its code.
        if not any(self.resolve().is_relative_to(each) for each in (run, *OWN_FILES, "/proc")):
            raise Outside(str(self))
        return opened(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", checking)
    return run


def fold(content: bytes) -> None:
    """Read a journal into all that is made of one without its run's directory."""
    messages = list(entries([content]))
    record = read_as(RunRecord, [content])
    if record is None:
        return
    source = Source(name="r", path="/r", state=RunState.FAILED, driver=None, read=0, version="")
    facts_of(record, source)
    record.ranks.overviews()
    tail = tail_of(messages)
    progress = Progress(ledger=tail.ledger)
    for entry in tail.news(messages):
        progress.take(entry)
    progress.left_s(10.0)
    for can_rewind in (True, False):
        rows = TrackedRows(Position(), can_rewind=can_rewind)
        for entry in messages:
            rows.take(entry)
        for row in rows.next().rows:
            numbers(row.metrics)
    now: dict[str, Any] = IDENTITY
    list(differences(record.identity, now, mutable_on_resume=()))
    list(content_differences(record.identity, now))
    options_of(record.identity)


def show(run: Path, content: bytes) -> None:
    """Read a journal as the commands and `Result` do."""
    (run / JOURNAL).write_bytes(content)
    location = Location.of(run, retry_s=0)
    history = read_as(RunRecord, [content])
    assert history is not None
    page(read_facts(location))
    found = PresentRun(location=location, history=history, holder=None)
    "".join(run_lines(found)).encode(errors="strict")
    strict_json.dumps(strict_json.plain({"facts": shown_facts(found)}))
    result = recorded(location, history, config=None, backend=Reference(label="y"))
    with contextlib.suppress(PolytrainError):
        _ = result.return_value


def lines(*given: dict[str, Any]) -> bytes:
    return "".join(f"{json.dumps(each)}\n" for each in given).encode()


BEFORE = lines(*(ENTRIES[at] for at in (0, 2, 5, 9, 10)))
AFTER = lines(*(ENTRIES[at] for at in (23, 25)))


@pytest.mark.parametrize("entry", ENTRIES, ids=[each["event"] for each in ENTRIES])
def test_each_field_of_a_journal(entry: dict[str, Any]) -> None:
    def read(changed: bytes) -> None:
        fold(BEFORE + changed + b"\n" + AFTER)

    assert wrong(entry, read, (PolytrainError,)) == []


@pytest.mark.parametrize("what", HOSTILE)
def test_a_journal_with_it_wherever_it_is_taken(what: str, run: Path) -> None:
    taken = []
    for entry in ENTRIES:
        text = json.dumps(entry)
        for path in fields_in(entry):
            if path[0] in ("event", "time", "token", "phase"):
                continue
            # Inside of what was replaced there is nothing any more.
            with contextlib.suppress(PolytrainError, LookupError, TypeError):
                changed = with_json(json.loads(text), path, HOSTILE[what])
                if any(entries([changed.encode()])):
                    json.loads(changed)
                    text = changed
        taken.append(text)
    show(run, "\n".join(taken).encode())


def test_a_journals_error_names_line_and_field() -> None:
    bad = {**ENTRIES[2], "world_size": "../x"}
    with pytest.raises(DamagedFileError) as caught:
        list(entries([lines(*ENTRIES[:2], bad)]))
    said = "journal.jsonl, line 3: 'world_size' is '../x', not a whole number. The file is damaged"
    assert str(caught.value).startswith(said)


def test_ten_megabytes_are_read_or_refused_at_once(run: Path) -> None:
    text = "x" * 10_000_000
    failure = {**LOST, "message": text}
    ended = line(6, "AttemptEnded", attempt=0, failure=failure, reason="r")
    show(run, lines(*ENTRIES, ended))
    # A line that doesn't end, in small pieces.
    assert list(entries(b"y" * 1000 for _ in range(10_000))) == []
    leases = run / "leases"
    leases.mkdir()
    (leases / "000001").write_text(json.dumps({**LEASE, "host": text}))
    with pytest.raises(OSError, match="more than 65,536 bytes"):
        holder(Location.of(run, retry_s=0).open())


def read_manifest(content: bytes) -> None:
    digest = ""
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(content)
        in_order = json.dumps([MANIFEST_FORMAT, body], sort_keys=True)
        digest = hashlib.sha256(in_order.encode()).hexdigest()
    text = f'{{"format": {MANIFEST_FORMAT}, "sha256": "{digest}", "manifest": '
    manifest = parse_manifest(text.encode() + content + b"}")
    file_differences(manifest, {})
    ranked(
        [manifest, replace(manifest, number=1)], CheckpointConfig(checkpoint_score_attribute="loss")
    )
    for file in manifest.files:
        assert ".." not in file.name.split("/")
        assert not file.name.startswith("/")
    assert "/" not in manifest.directory
    for position in manifest.positions.values():
        DataPosition.from_plain(position)


def test_a_manifest() -> None:
    position = DataPosition(epoch=1, start=2, plan=Plan(rows=9, shards=2), digests={"files": "12"})
    manifest = replace(MANIFEST, positions={"train": position.to_plain()})
    assert wrong(asdict(manifest), read_manifest, (ValueError,)) == []


def test_a_manifest_of_anything() -> None:
    for text in HOSTILE.values():
        with pytest.raises(ValueError, match=r"."):
            parse_manifest(text)


def test_the_position_in_a_stream() -> None:
    plain = {"epoch": 1, "segments": [[2, 5]], "digests": {"steps": "12"}}

    def read(content: bytes) -> None:
        StreamPosition.from_plain(strict_json.loads(content), 2)

    assert wrong({"position": plain}, lambda _: None, ()) == []
    assert wrong(plain, read, (ValueError,)) == []


LEASE = {
    "host": "h",
    "pid": 1,
    "process_started": 1,
    "nonce": "n",
    "machine": "m",
    "since": "s",
    "beats": 1,
    "beat_at": 1.0,
    "released": False,
}


def test_a_lease(run: Path) -> None:
    (run / "leases").mkdir()
    # Names that are no numbers of leases.
    for name in ("²", "9" * 200, "-1", "000001.\x1b", "x"):
        (run / "leases" / name).write_text("{}")
    storage = Location.of(run, retry_s=0).open()

    def read(content: bytes) -> None:
        (run / "leases/000001").write_bytes(content)
        with contextlib.suppress(OSError):
            found = holder(storage)
            assert found is not None
            assert found.token == 1
            assert 0 <= found.beat_at < 1e12

    assert wrong(LEASE, read, ()) == []


class Answering:
    """A storage in which each request is answered at once."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.path = answer, ""

    def write(self, path: str, data: bytes) -> None:
        self.path = path

    def list(self, directory: str) -> Mapping[str, int]:
        return {f"{self.path}.answer": 1}

    def read(self, path: str) -> bytes:
        return self.answer

    def delete(self, path: str) -> None:
        pass

    is_local = True


def test_requests_and_answers(run: Path) -> None:
    stops: list[Any] = []
    storage = Location.of(run, retry_s=0).open()
    (run / "requests/000001").mkdir(parents=True)
    count = 0

    def requested(content: bytes) -> None:
        nonlocal count
        count += 1
        (run / f"requests/000001/{count}").write_bytes(content)
        RemoteRequests(
            storage, 1, stop=stops.append, stacks=lambda request: None, inline_thread=0
        )._take_new()
        for each in (run / "requests/000001").iterdir():
            each.unlink()

    assert wrong({"kind": "stop", "reason": "r"}, requested, (OSError,)) == []
    assert all(type(each.reason) is str for each in stops)

    def answered(content: bytes) -> None:
        answering: Any = Answering(content)
        answer = ask(answering, 1, RequestKind.STACKS, timeout_s=1)
        assert all(rank.isdigit() for rank in answer.get("stacks", {}))

    allowed = (DamagedFileError, NoAnswerError)
    assert wrong({"stacks": {"0": "text"}}, answered, allowed) == []


@pytest.mark.parametrize(
    "tracker", [CSV("/else/x.csv"), WandB(mode="offline", project="p", directory="/else")]
)
def test_the_state_of_a_tracker(run: Path, tracker: CSV | WandB) -> None:
    state = TrackerState.of(tracker)
    storage: Storage = Location.of(run, retry_s=0).open()
    state.write(storage)
    valid = {**json.loads((run / state.file).read_text()), "run_id": "ab12"}

    def read(content: bytes) -> None:
        (run / state.file).write_bytes(content)
        kept = kept_state(storage, tracker)
        assert kept.run_id.isalnum() or kept.run_id == "" or isinstance(tracker, CSV)
        for each in kept_trackers(storage):
            each.resolved()
        lags(storage, entries([json.dumps(ENTRIES[0]).encode()]), since=1)

    assert wrong(valid, read, (ValueError, OSError)) == []


def test_the_record_of_predictions() -> None:
    def read(content: bytes) -> None:
        record = record_from_json(content)
        if record is not None:
            list(record_problems(record, RECORD, place="there"))

    assert wrong(json.loads(RECORD.to_json()), read, ()) == []


def test_a_checkpoints_metadata(run: Path) -> None:
    def read(content: bytes) -> None:
        (run / ".metadata.json").write_bytes(content)
        Checkpoint(str(run)).get_metadata()

    assert wrong({"a": {"b": 1}}, read, (PolytrainError,)) == []
    for text in HOSTILE.values():
        (run / ".metadata.json").write_text(text)
        with contextlib.suppress(PolytrainError):
            assert isinstance(Checkpoint(str(run)).get_metadata(), dict)


class Armed:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was read",))


@pytest.mark.parametrize("kind", ["plain", "pickled", "lost", "other", "", None, 1, [], {}, b"x"])
def test_return_values_of_any_kind_are_not_unpickled(kind: Any) -> None:
    from polytrain.functions.pickling import dumps

    data = msgpack.packb([[kind, dumps(Armed()), "why"]])
    with contextlib.suppress(ValueError, PolytrainError):
        [returned] = from_bytes(data)
        assert returned is not None
        value = returned.value(rank=0, may_unpickle=False)
        pytest.fail(f"it has a value: {value!r}")


def test_return_values() -> None:
    good = to_bytes([Returned(kind="plain", data=msgpack.packb([1])), None])
    assert [each and each.value(rank=0, may_unpickle=False) for each in from_bytes(good)] == [
        [1],
        None,
    ]
    deep = b"\x91" * 100_000
    tuples = b"\xc0"
    for _ in range(500):
        tuples = msgpack.packb(msgpack.ExtType(1, b"\x91" + tuples))
    arrays = [
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        deep,
        tuples,
        msgpack.packb(msgpack.ExtType(2, b"")),
        msgpack.packb(msgpack.ExtType(2, b"\0\x93NUMPY\x01\0v\0{'descr': '<f8', " + b"9" * 99)),
    ]
    values = [b"", b"\xc1", *arrays, msgpack.packb({"a": 1}), msgpack.packb("abc")]
    values += [msgpack.packb([["plain", each, ""]]) for each in arrays]
    values += [
        msgpack.packb([each]) for each in (1, "pickled", [], [1, 2, 3, 4], ["plain", "x", 1])
    ]
    for each in values:
        with contextlib.suppress(ValueError, PolytrainError):
            for returned in from_bytes(each):
                assert returned is None or returned.value(rank=0, may_unpickle=False) is not None


JOB = """
backend = "xgboost"
label = "y"
train_loop_per_worker = "json:dumps"
params = {max_depth = 4, fn = {import = "json:loads"}}
[datasets]
train = "houses/*.parquet"
[scaling_config]
num_workers = [1, 2]
[run_config]
name = "r"
failure_config = {max_failures = 3}
[dataset_config]
train = {shuffle = true}
"""


@pytest.mark.parametrize(
    "value",
    [
        '""',
        '"x"',
        "1",
        "-1",
        "true",
        "nan",
        "[]",
        "[[1]]",
        "{}",
        "{import = 5}",
        '{import = ""}',
        '{import = ":"}',
        '{import = "no module:x"}',
        '{import = "..:x"}',
        '{import = ".a:x"}',
        '{import = "json:a..b"}',
        '"\\u0000:x"',
        '{import = "a\\u0000b:x"}',
        f'"{"x" * 100_000}"',
        "[" * 50_000,
        "[" * 50_000 + "]" * 50_000,
        "9" * 5000,
        "2024-01-01",
        "{max_failures = {a = 1}}",
    ],
)
def test_a_job_file(value: str) -> None:
    found = []
    for name in (
        *("backend", "label", "train_loop_per_worker", "params", "datasets", "scaling_config"),
        *("run_config", "dataset_config", "dataset_config.train", "run_config.failure_config"),
        *("scaling_config.num_workers", "params.max_depth", "run_config.name", "other", ""),
    ):
        try:
            arguments_of(job_of(JOB, [f"{name}={value}"]))
            arguments_of(job_of(f"x = {value}\n{JOB}"))
        except JobFileError:
            pass
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}"[:200])
    assert found == []
