"""The entries of a run's journal: a class for each event, and how a line holds them. Pure.

An entry that is written gets its time and its token from the journal. Fields that aren't stored are
for those who hear of an entry while the run lasts: what is read has their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from polytrain.errors import DamagedFileError, Failure, FailureKind, RunFormatError
from polytrain.events.notices import Skipped, as_skipped
from polytrain.policy.validation import ValidationStatus
from polytrain.record.configuration import Configuration, configuration_in
from polytrain.storage.typed_json import (
    UNSTORED,
    Count,
    Digits,
    Duration,
    FileName,
    Like,
    Ranks,
    Seconds,
    Stored,
    Within,
    fitting,
    is_stored,
)
from polytrain_plugins import Stopped

FORMAT = 6
"""Format of the lines: a journal of another format isn't read."""


class CodeContent(TypedDict):
    """The part of a run's identity that is code and objects, as fingerprints."""

    train_loop_per_worker: str | None
    objects: dict[str, str]
    transforms: dict[str, str | None]


class _Content(TypedDict, total=False):
    python: str
    train_loop_per_worker: str | None
    train_loop_config: Any
    objects: dict[str, str]
    transforms: dict[str, str | None]
    datasets: dict[str, dict[str, str]]
    restore_from: str | None


_Identity = TypedDict(
    "_Identity",
    {
        "backend": str,
        "salt": Annotated[str, Like(r"[0-9a-f]{1,128}", "a salt")],
        "training function": bool,
        "options": dict[str, Any],
        "datasets": dict[str, dict[str, Any]],
        "content": _Content,
    },
    total=False,
)

_NO_CONTENT: _Content = {
    "python": "",
    "train_loop_per_worker": None,
    "train_loop_config": None,
    "objects": {},
    "transforms": {},
    "datasets": {},
    "restore_from": None,
}
_NO_IDENTITY: _Identity = {
    "backend": "",
    "training function": False,
    "options": {},
    "datasets": {},
    "content": _NO_CONTENT,
}
"""What is left out is something else than any request asks for."""


CODE_AFTER = "code after"
"""Key of a run's identity in memory: `RunConcluded.code`."""


def with_code_after(identity: Mapping[str, Any], concluded: RunConcluded) -> Mapping[str, Any]:
    """Return a driver's identity with the code at the end of its training."""
    if concluded.code is None:
        return identity
    return {**identity, CODE_AFTER: concluded.code}


def _whole_identity(read: Mapping[str, Any]) -> Mapping[str, Any]:
    content = {**_NO_CONTENT, **read.get("content", {})}
    return {**_NO_IDENTITY, **read, "content": content}


class _Configuration(TypedDict, total=False):
    options: dict[str, Any]
    datasets: dict[str, dict[str, Any]]
    versions: dict[str, str]
    cluster: str
    hyperparameters: dict[str, Any]
    command: list[str]
    script: str


def _known_configuration(read: Mapping[str, Any] | None) -> Configuration | None:
    return None if read is None else configuration_in(read)


class _Failure(TypedDict):
    kind: str
    rank: Ranks | None
    message: str
    host: NotRequired[str]
    step: Count
    traceback: NotRequired[str]
    output: NotRequired[str]
    last_lines: NotRequired[list[str]]
    stacks: NotRequired[dict[Digits, str]]


_FAILURE_FIELDS = tuple(_Failure.__annotations__)


def _failure(read: Mapping[str, Any] | None) -> Failure | None:
    if read is None:
        return None
    known: dict[str, Any] = {name: read[name] for name in _FAILURE_FIELDS if name in read}
    # A newer version may know more kinds.
    known["kind"] = FailureKind.__members__.get(read["kind"], FailureKind.UNKNOWN)
    known["last_lines"] = tuple(read.get("last_lines", ()))
    return Failure(**{**known, "stacks": _by_rank(read.get("stacks", {}))})


def _by_rank(read: Mapping[str, str]) -> Mapping[int, str]:
    return {int(rank): text for rank, text in read.items()}


class _Task(TypedDict, total=False):
    fn_kwargs: dict[str, Any]
    timeout_s: float | None


def _whole_task(read: Mapping[str, Any]) -> Mapping[str, Any]:
    # Empty for the default.
    return {"fn_kwargs": {}, "timeout_s": None, **read} if read else read


_Share = Annotated[float, Within(-1000, 1000)]
_Cpus = Annotated[float, Within(0, 1e6)]
_GpuUse = tuple[_Share | None, Count | None]
_Stacks = Annotated[Mapping[int, str], Stored(dict[Digits, str], _by_rank)]
_ReturnsFile = Annotated[
    str, Like(r"return_values-[0-9]{6,18}\.msgpack", "the name of a file of return values")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the journal."""

    time: Seconds = 0.0
    """When it was written, in seconds since the epoch, by the driver's clock."""

    token: Count = 0
    """Fencing token of the driver's lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Entry):
    """A driver starts to work on the run."""

    anew: bool
    identity: Annotated[Mapping[str, Any], Stored(_Identity, _whole_identity)]
    world_size: Ranks
    began: Seconds | None = None
    """When `fit()` was called, in seconds since the epoch."""

    ranking: tuple[str | None, Literal["max", "min"]] = (None, "max")
    """The metric that ranks checkpoints, and its order."""

    total_steps: Count | None = None
    """The most steps of the whole run; None if that is unknown."""

    time_budget_s: float | None = None
    """Seconds of training that end the run; None if none do."""

    stop_function: str | None = None
    """Fingerprint of the function in `RunConfig.stop`."""

    configuration: Annotated[
        Configuration | None, Stored(_Configuration | None, _known_configuration)
    ] = None
    """What people look up of it; nothing depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFound(Entry):
    """The driver's code is in a git repository, at this commit."""

    commit: Annotated[str, Like(r"[0-9a-f]{40,64}", "a commit")]
    branch: str = ""
    """Empty if none is checked out."""

    is_dirty: bool | None = None
    """Whether the code differs from the commit; None if that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitioned(Entry):
    """The state machine has changed its state."""

    cause: str
    """Name of the event that it took. A line has it as its own event."""

    phase: str
    """The state machine's phase after that."""

    attempt: Count
    reason: str = ""
    stalled_s: Duration = 0.0
    """Seconds that rank 0's training has stood still for checkpoints in this attempt."""

    copied_s: Duration = 0.0
    """Seconds that it has stood still for copies of its state in memory."""

    since_s: Duration = 0.0
    """Seconds from a failure until it was noticed; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined(Transitioned):
    """A rank has entered the collective and begins to train."""

    rank: Ranks
    rows: Mapping[str, Count] = field(default_factory=dict)
    """Data set → how many of its rows this rank has; without those that nobody has counted."""

    device: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Transitioned):
    """The attempt has to make a checkpoint and stop, for this reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Entry):
    """An attempt starts."""

    attempt: Count
    step: Count
    """The step that it resumes from; later steps are reported again."""

    start: str | None
    """The checkpoint that it resumes from."""

    world_size: Ranks
    hosts: Sequence[str] = ()
    """Every rank's, in rank order."""

    gpus: Sequence[Ranks] = ()
    """How many every rank has."""

    virtual_workers: Ranks | None = None
    """None if the attempt has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesRequested(Entry):
    """Every rank's process is requested: data and starting point are on the nodes."""

    attempt: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReported(Entry):
    """A rank has reported metrics. Those of ranks above 0 are stored if the user wants them."""

    rank: Ranks = 0
    n: Count = 0
    """How many reports of this rank the driver has written before: the journal counts them."""

    step: Count
    metrics: Mapping[str, Any]
    stalled_s: Duration = 0.0
    """Seconds that rank 0's training has stood still for checkpoints in this attempt."""

    copied_s: Duration = 0.0
    """Seconds that it has stood still for copies of its state in memory."""

    survivor: Ranks | None = None
    """The rank that has made it for rank 0, which was lost before; None if it was rank 0 itself.
    Such a report is never part of a block."""

    attempt: int = field(default=0, metadata=UNSTORED)
    at: float = field(default=0.0, metadata=UNSTORED)
    """When it was reported, in seconds since the epoch, on the rank's node."""

    has_checkpoint: bool = field(default=False, metadata=UNSTORED)
    """Whether the rank has staged its part of a checkpoint with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestsKept(Entry):
    """Digests of rank 0's state at a report."""

    step: Count
    names: Sequence[str] = ()
    """The tensors; empty if they are those of the driver's last such entry."""

    digests: str
    """Their digests one after the other, `DIGEST_LENGTH` characters each."""


DIGEST_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessChecked(Entry):
    """A check of whether an attempt computes the same bits at any number of workers."""

    attempt: Count
    why_not: str
    """Why it may not; empty if a check has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBlock(Entry):
    """Many reports of one rank that follow one another: `record.lines` reads and writes them."""

    rank: Ranks = 0
    n: Count
    """How many reports of this rank the driver has written before."""

    count: Count
    times: Any = None
    stalled_s: Any = None
    copied_s: Any = None
    steps: Any = None
    columns: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Entry):
    """A checkpoint is committed: a restart resumes from it."""

    checkpoint: FileName
    """Name of its directory."""

    step: Count
    good_step: Count | None = None
    """The last step that every rank of the attempt had reported by then, and no report had shown
    to be bad: `State.good_step`. None if nothing counts as divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDropped(Entry):
    """A checkpoint is left out, because a rank's part can't be stored."""

    attempt: Count
    checkpoint: Count
    """Its number."""

    rank: Ranks
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRequested(Entry):
    """A checkpoint is to be validated, once it is committed."""

    checkpoint: FileName
    step: Count
    task: Annotated[Mapping[str, Any], Stored(_Task, _whole_task)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationEnded(Entry):
    """A checkpoint was validated, or couldn't be: its metrics are in the history from now on."""

    checkpoint: FileName
    step: Count
    status: ValidationStatus
    metrics: Mapping[str, Any]
    reason: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditionMet(Entry):
    """A report of rank 0, or a validation, meets a condition that ends the run."""

    attempt: Count = 0
    stopped: Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceFound(Entry):
    """A rank's report shows that training diverges; see `Rollback` for the fields."""

    attempt: Count
    rank: Ranks
    step: Count
    good_step: Count
    reason: str
    skipped: Annotated[
        Mapping[str, tuple[Skipped, ...]],
        Stored(dict[str, list[tuple[Count, Count, Count]]], as_skipped),
    ]
    only_discards: bool = False
    """Whether the run only goes back behind a survivor's state, which is no rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Entry):
    """An attempt has ended early."""

    attempt: Count
    failure: Annotated[Failure | None, Stored(_Failure | None, _failure)]
    """Why it failed; None for a planned end."""

    reason: str
    failures: tuple[Failure, ...] = field(default=(), metadata=UNSTORED)
    """All that went wrong, the one that counts first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsAsked(Entry):
    """After a loss, the other ranks were asked for the state of the last step."""

    attempt: Count
    rank: Ranks | None
    """The rank whose state is committed as a checkpoint; None if none is."""

    step: Count | None
    """The number of reports before it."""

    hosts: Sequence[str] = ()
    """The hosts on which it lay."""

    reason: str
    """Why there is none, so that steps since the last checkpoint are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksDumped(Entry):
    """The stacks of ranks were dumped, because something hung."""

    attempt: Count
    reason: str
    stacks: _Stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFound(Entry):
    """A rank is slower than the others."""

    attempt: Count
    rank: Ranks
    host: str = ""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMeasured(Entry):
    """How busy the ranks were, the CPUs and memory of their processes, and their GPUs.

    The more ranks, the more windows make one line.
    """

    attempt: Count
    window: Count
    """The last one's number, from 0."""

    windows: Count = 1
    busy: Sequence[_Share]
    """Each rank's mean share, between 0 and 1."""

    cpu: Sequence[_Cpus] = ()
    """The CPUs that each rank's process used, on average."""

    memory: Sequence[Count] = ()
    """Each rank's most, in bytes."""

    gpus: Sequence[Sequence[_GpuUse]] = ()
    """Of each rank's GPUs the mean share of time in which they computed, and the most bytes of
    their memory that were in use; None if unknown. Empty if nothing of any rank is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConcluded(Entry):
    """The run has ended, or this driver has stopped working on it."""

    succeeded: bool
    stopped: Stopped | None
    """Who stopped the run, or which condition ended it; None if its training has ended."""

    reason: str
    validation_failure: str = ""
    """Why no checkpoint has a score, if every validation failed; else empty."""

    code: CodeContent | None = None
    """What `identity.code_of` returns at the end, if training in the driver's own process has
    changed it."""

    why_not_exact: tuple[str, ...] | None = field(default=None, metadata=UNSTORED)
    """`RunHistory.why_not_exact` at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesReturned(Entry):
    """The training functions have returned something."""

    file: _ReturnsFile
    """Where that is, beside the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Entry):
    """This driver has released all resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChanged(Entry):
    """The machine's clock was set, or the machine was suspended."""

    by_s: Duration = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEntry(Entry):
    """An event of a newer version."""

    event: str


KINDS: Mapping[str, type[Entry]] = {
    "Opened": Opened,
    "GitCommit": CommitFound,
    "Launched": Launched,
    "Started": ProcessesRequested,
    "Joined": RankJoined,
    "DrainWanted": DrainRequested,
    "Reported": MetricsReported,
    "Reports": ReportBlock,
    "Digests": DigestsKept,
    "Exactness": ExactnessChecked,
    "Committed": CheckpointCommitted,
    "PartVoid": CheckpointDropped,
    "SurvivorsAsked": SurvivorsAsked,
    "ValidationRequested": ValidationRequested,
    "ValidationEnded": ValidationEnded,
    "ConditionMet": StopConditionMet,
    "Diverged": DivergenceFound,
    "AttemptEnded": AttemptEnded,
    "StacksDumped": StacksDumped,
    "Straggler": StragglerFound,
    "Load": LoadMeasured,
    "Concluded": RunConcluded,
    "Returned": ValuesReturned,
    "Closed": Closed,
    "ClockChanged": ClockChanged,
}
"""The event of a line → its entry. Any other line with a phase is a `Transitioned`."""

_EVENTS: Mapping[type[Entry], str] = {kind: event for event, kind in KINDS.items()}


def decoded(line: Mapping[str, Any], *, file: str, number: int) -> Entry:
    """Return a line of the journal as an entry. Fields of a newer version are left out.

    Args:
        line: an object with the fields `time`, `token` and `event`.

    Raises:
        RunFormatError: it opens a journal of another format.
        DamagedFileError: a field is missing, or is something else.
    """
    event = line["event"]
    where = f"{file}, line {number}"
    if type(event) is not str:
        raise DamagedFileError(where, "event", f"is {event!r}, not text"[:200])
    if event == "Opened" and line.get("format") != FORMAT:
        found = line.get("format", 1)
        raise RunFormatError(found if type(found) is int else "unknown", FORMAT)
    kind = KINDS.get(event)
    if kind is None:
        kind = Transitioned if "phase" in line else UnknownEntry
    known = {name: line[name] for name in _FIELDS[kind] if name in line}
    if issubclass(kind, Transitioned):
        known["cause"] = event
    return fitting(kind, known, file=where)


def encoded(entry: Entry) -> dict[str, Any]:
    """Return an entry as its line holds it, without what has its default."""
    kind = type(entry)
    event = entry.cause if isinstance(entry, Transitioned) else _EVENTS[kind]
    line: dict[str, Any] = {"time": entry.time, "token": entry.token, "event": event}
    if kind is Opened:
        line["format"] = FORMAT
    for name, default in _WRITTEN[kind].items():
        value = getattr(entry, name)
        if value is not default and (default is MISSING or value != default):
            line[name] = value if type(value) in _JSON else _plain(value)
    return line


def _stored_fields(kind: type[Entry]) -> Mapping[str, Any]:
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(kind)
        if is_stored(each)
    }


_FIELDS: Mapping[type[Entry], Mapping[str, Any]] = {
    kind: _stored_fields(kind) for kind in (*KINDS.values(), Transitioned, UnknownEntry)
}
"""Entry → the fields that a line has, with their defaults; MISSING where there is none."""

_HEAD = ("time", "token", "cause")
_WRITTEN: Mapping[type[Entry], Mapping[str, Any]] = {
    kind: {name: default for name, default in known.items() if name not in _HEAD}
    for kind, known in _FIELDS.items()
}
"""The same without what each line begins with."""

_JSON = frozenset({int, float, str, bool, list, dict, tuple, type(None)})


def _plain(value: Any) -> Any:
    if isinstance(value, Failure):
        named = {name: getattr(value, name) for name in _FAILURE_FIELDS}
        return {**named, "kind": value.kind.name}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
