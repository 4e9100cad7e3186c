"""What the lines of a journal hold: the type of each field, and the fields of each event. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from polytrain.errors import DamagedFileError, RunFormatError
from polytrain.policy.validation import ValidationStatus
from polytrain.storage.typed_json import (
    Count,
    Digits,
    Duration,
    FileName,
    Like,
    Ranks,
    Seconds,
    Within,
    fitting,
)
from polytrain_plugins import Stopped

FORMAT = 4
"""Format of the lines: a journal of another format isn't read."""

_ReturnsFile = Annotated[
    str, Like(r"return_values-[0-9]{6,18}\.msgpack", "the name of a file of return values")
]
_Share = Annotated[float, Within(-1000, 1000)]


class _Content(TypedDict, total=False):
    python: str
    train_loop_per_worker: str | None
    train_loop_config: Any
    objects: dict[str, str]
    transforms: dict[str, str | None]
    datasets: dict[str, str]


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
}
_NO_IDENTITY: _Identity = {
    "backend": "",
    "training function": False,
    "options": {},
    "datasets": {},
    "content": _NO_CONTENT,
}
"""What is left out is something else than any request asks for."""


class _Configuration(TypedDict, total=False):
    options: dict[str, Any]
    datasets: dict[str, dict[str, Any]]
    versions: dict[str, str]
    cluster: str


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


class _Task(TypedDict):
    fn_kwargs: dict[str, Any]
    timeout_s: float | None


class _Line(TypedDict):
    time: Seconds
    token: Count
    event: str


class _Entry(_Line, total=False):
    """A field means the same in all events that have it, but for many reports in one line."""

    anew: bool
    attempt: Count
    began: Seconds
    busy: list[_Share]
    by_s: Duration
    checkpoint: FileName | Count
    configuration: _Configuration | None
    device: str
    failure: _Failure | None
    file: _ReturnsFile
    gpus: list[Ranks]
    host: str
    hosts: list[str]
    identity: _Identity
    memory: list[Count]
    metrics: dict[str, Any]
    n: Count
    node: str
    phase: str
    rank: Ranks
    ranking: tuple[str | None, Literal["max", "min"]]
    reason: str
    validation_failure: str
    rows: dict[str, Count]
    since_s: Duration
    stacks: dict[Digits, str]
    stalled_s: Duration
    start: str | None
    status: ValidationStatus
    step: Count
    stop_function: str | None
    stopped: dict[str, Any] | None
    succeeded: bool
    task: dict[str, Any]
    time_budget_s: float | None
    total_steps: Count | None
    traceback: str
    window: Count
    windows: Count
    world_size: Ranks


class _ManyReports(_Line):
    """The reports themselves are read by `history.new_reports`."""

    n: Count
    count: Count
    rank: NotRequired[Ranks]


_MANY_REPORTS = ("Reports", "RankReports")
REPORTS = frozenset({"Reported", "RankReported", *_MANY_REPORTS})
"""The events that are reports."""

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "Opened": ("anew", "identity", "world_size"),
    "Launched": ("attempt", "step", "start", "world_size"),
    "Reported": ("n", "step", "metrics"),
    "RankReported": ("rank", "n", "step", "metrics"),
    "RankReports": ("rank",),
    "Committed": ("checkpoint", "step"),
    "DrainWanted": ("reason",),
    "ValidationRequested": ("checkpoint", "step", "task"),
    "ValidationEnded": ("checkpoint", "step", "status", "metrics", "reason"),
    "ConditionMet": ("stopped",),
    "AttemptEnded": ("attempt", "failure", "reason"),
    "StacksDumped": ("attempt", "reason", "stacks"),
    "Straggler": ("rank", "reason"),
    "Load": ("busy",),
    "Concluded": ("succeeded", "stopped", "reason"),
    "Returned": ("file",),
}


def checked(entry: Mapping[str, Any], *, file: str, number: int) -> dict[str, Any]:
    """Return an entry, if each of its fields is what an entry of its event holds.

    Args:
        entry: an object with the fields `time`, `token` and `event`.
        file: the journal's name, for errors.
        number: the number of its line, from 1.

    Raises:
        RunFormatError: it opens a journal of another format.
        DamagedFileError: a field is missing, or is something else.
    """
    event = entry["event"]
    if event == "Opened" and entry.get("format") != FORMAT:
        found = entry.get("format", 1)
        raise RunFormatError(found if type(found) is int else "unknown", FORMAT)
    where = f"{file}, line {number}"
    kind: Any = _ManyReports if event in _MANY_REPORTS else _Entry
    read: dict[str, Any] = fitting(kind, entry, file=where)
    required = (*_REQUIRED.get(event, ()), *(("attempt",) if "phase" in entry else ()))
    missing = [name for name in required if name not in entry]
    if missing:
        raise DamagedFileError(where, missing[0], f"is missing in an entry {event!r}")
    if event == "Opened":
        content = {**_NO_CONTENT, **read["identity"].get("content", {})}
        read["identity"] = {**_NO_IDENTITY, **read["identity"], "content": content}
    if read.get("stopped") is not None or event == "ConditionMet":
        fitting(Stopped, read["stopped"], file=f"{where}, stopped")
    # Empty for the default.
    if read.get("task"):
        fitting(_Task, read["task"], file=f"{where}, task")
    return read
