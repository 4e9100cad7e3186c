"""Kills this process at a line of polytrain's own code that somebody has chosen.

Every line that a process executes in the modules that deal with checkpoints is a point, named by
the process's role, the file, the line, and which of the visits to this line it is. Nothing in
polytrain knows of this: it is Python's tracing. What polytrain calls in the standard library to
hash, copy and delete counts as well, so there are points between two deletions of one directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import linecache
import os
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

PLAN = "POLYTRAIN_CRASH_PLAN"
"""Variable with the path of the plan that the processes of a run find when they start."""

_WATCHED = (
    "checkpoint/",
    "storage/",
    "run/",
    "record/",
    "policy/retention.py",
    "workers/agents/agent.py",
    "workers/session/checkpoint_files.py",
    "workers/driver/inline_group.py",
    "workers/agents/part_storer.py",
    "workers/session/session.py",
    "api/result.py",
    "api/trainer.py",
)
_LIBRARY = {module.__file__: f"{module.__name__}.py" for module in (shutil, hashlib)}

_FUNCTION_BODY = 1
"""CO_OPTIMIZED: what modules and classes do while they are imported lacks it."""

_TELLS_RANK = "run_worker"
"""The function of worker processes in which they come to know their rank."""

_BY_THE_CLOCK = ("run/requests.py", "run/lease.py", "run/program.py")
"""Files of what is done every few seconds, or once git has answered: a slower run does it more
often, a fast one never."""

_WRITES = re.compile(r"\.write\((data|text|chunk)\)|copyfile\(")
_WRITTEN_OF_A_TORN_FILE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of code, in a process of a role."""

    role: str
    file: str
    number: int
    function: str
    is_by_clock: bool
    """Whether it depends on the time whether a run comes here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One visit to a line."""

    line: Line
    visit: int
    """Which, from 1, counted in each process."""

    tears: bool = False
    """Not to die before the line, but while it writes to a file."""

    def __str__(self) -> str:
        line = self.line
        torn = ", in the middle of the write" if self.tears else ""
        return (
            f"{line.role} at {line.file}:{line.number} ({line.function}), visit {self.visit}{torn}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a process has to do about its points."""

    record: str | None = None
    """File that every visited line is written to."""

    point: Point | None = None
    """Where to die."""

    fired: str = ""
    """File that is there once somebody has died there: nobody does twice."""

    def to_json(self) -> str:
        """As text for `read_plan`."""
        return json.dumps(asdict(self))


def read_plan(path: str) -> Plan | None:
    """The plan in a file; None if there is none, or it has been carried out."""
    try:
        fields = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    if fields["point"] is not None:
        if Path(fields["fired"]).exists():
            return None
        point = fields["point"]
        fields["point"] = Point(**{**point, "line": Line(**point["line"])})
    return Plan(**fields)


def recorded_lines(path: Path) -> list[Line]:
    """What a recording has written, in order."""
    lines = []
    for text in path.read_text().splitlines():
        role, file, number, function, by_clock = text.split("\t")
        lines.append(
            Line(
                role=role,
                file=file,
                number=int(number),
                function=function,
                is_by_clock=bool(by_clock),
            )
        )
    return lines


def writes_to_a_file(line: Line) -> bool:
    """Whether the process can be made to die while it executes this line."""
    path = next((path for path, name in _LIBRARY.items() if name == line.file), None)
    source = linecache.getline(path or str(_root() / line.file), line.number)
    return bool(_WRITES.search(source))


def watch(plan: Plan, role: str) -> None:
    """Carry a plan out in this process, from the next function call on."""
    watcher = _Watcher(plan, role)
    threading.settrace(watcher)
    sys.settrace(watcher)


def watch_at_start() -> None:
    """The same in a process of Ray's, or a zygote's trainer, according to the environment."""
    path = os.environ.get(PLAN)
    command = " ".join(sys.orig_argv)
    if path is None:
        return
    if "polytrain.workers.processes.zygote" in command:
        os.register_at_fork(after_in_child=lambda: _watch_as(path, "trainer"))
    elif "default_worker.py" in command:
        sys.meta_path.insert(0, _OnImport("polytrain.workers.agents.agent", path, "agent"))


def _watch_as(path: str, role: str) -> None:
    plan = read_plan(path)
    if plan is not None:
        watch(plan, role)


class _OnImport:
    """A finder that finds nothing: it begins to watch when a certain module is looked for."""

    def __init__(self, module: str, path: str, role: str) -> None:
        self._module = module
        self._path = path
        self._role = role

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == self._module:
            sys.meta_path.remove(self)
            _watch_as(self._path, self._role)
        return None


class _Watcher:
    """The trace function."""

    def __init__(self, plan: Plan, role: str) -> None:
        self._plan = plan
        self._role = role
        self._names: dict[str, str | None] = {}
        self._visits = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self._role != "driver" and code.co_name == _TELLS_RANK and "rank" in frame.f_locals:
            self._role = f"{self._role.split()[0]} {frame.f_locals['rank']}"
        name = self._watched(frame)
        if name is None or not code.co_flags & _FUNCTION_BODY:
            return None
        point = self._plan.point
        if point is not None and name != point.line.file:
            return None

        def follow(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                self._reached(name, frame)
            return follow

        return follow

    def _watched(self, frame: FrameType) -> str | None:
        """The name of the file that a frame is in, if it counts."""
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename in _LIBRARY:
            # Of the library, only what polytrain calls.
            caller = caller.f_back
        if caller is None or self._own_name(caller.f_code) is None:
            return None
        return self._own_name(frame.f_code) or _LIBRARY.get(frame.f_code.co_filename)

    def _own_name(self, code: CodeType) -> str | None:
        path = code.co_filename
        if path not in self._names:
            name = path.removeprefix(f"{_root()}/")
            self._names[path] = name if name != path and name.startswith(_WATCHED) else None
        return self._names[path]

    def _reached(self, name: str, frame: FrameType) -> None:
        function = frame.f_code.co_qualname
        if self._plan.record is not None:
            by_clock = "by clock" if self._is_by_clock(frame) else ""
            # Opened each time: a trainer closes what it hasn't opened itself.
            with open(self._plan.record, "a") as record:
                record.write(f"{self._role}\t{name}\t{frame.f_lineno}\t{function}\t{by_clock}\n")
        point = self._plan.point
        if point is None or (self._role, frame.f_lineno) != (point.line.role, point.line.number):
            return
        if self._is_by_clock(frame) != point.line.is_by_clock:
            return
        self._visits += 1
        if self._visits == point.visit and self._is_first():
            if point.tears:
                _die_while_writing(frame)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_by_clock(self, frame: FrameType) -> bool:
        caller: FrameType | None = frame
        while caller is not None:
            if self._own_name(caller.f_code) in _BY_THE_CLOCK:
                return True
            caller = caller.f_back
        return False

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self._plan.fired, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _die_while_writing(frame: FrameType) -> None:
    """Have the kernel end this process once a file is a few bytes longer than now."""
    found = frame.f_locals
    file = found.get("writing") or found.get("file") or getattr(found.get("self"), "_file", None)
    size = 0
    # A path has no descriptor: the file that it names is about to be made.
    with contextlib.suppress(AttributeError):
        size = os.fstat(file.fileno()).st_size  # type: ignore[union-attr]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + _WRITTEN_OF_A_TORN_FILE,) * 2)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _root() -> Path:
    """The directory of the package `polytrain`, which isn't imported for this."""
    global _found_root
    if _found_root is None:
        spec = importlib.util.find_spec("polytrain")
        assert spec is not None
        assert spec.origin is not None
        _found_root = Path(spec.origin).parent
    return _found_root


_found_root: Path | None = None
