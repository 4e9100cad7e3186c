"""What a first attempt has imported itself, and how a zygote gets it: the worker's and its side.

Only what is installed is learned: who writes a module beside the script doesn't expect it to be
imported but by the script. And only what comes to be the same if it is imported once for all: by
a function that has changed neither `sys.path` nor variables, into a process that has no thread,
child, open file or Ray afterwards that it hadn't before.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polytrain.common.processes import has_children, holds_device, open_files, thread_count
from polytrain.workers.messages import Message, SocketChannel, imported_message
from polytrain.workers.processes.client import preload_environment

_WORTH_IT = 30
"""Modules below which a fork would save milliseconds."""

_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_OF_ONE_WORKER = "VISIBLE"
"""In the names of variables that give a worker its devices: no other has the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadRequest:
    """What is to be imported for worker processes, and how these are."""

    modules: tuple[str, ...]
    """In the order in which the first worker process has imported them."""

    variables: Mapping[str, str | None]
    """Those that have changed there meanwhile, with their new values; None if they are gone."""

    environment: Mapping[str, str]
    directory: str


def is_installed(file: str) -> bool:
    """Whether a module's file belongs to the interpreter or to an installed distribution."""
    return not _INSTALLED.isdisjoint(file.split(os.sep)) or file.startswith(_STANDARD)


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that differ, with their new values; None for those that are gone."""
    return {
        name: after.get(name)
        for name in (*before, *(name for name in after if name not in before))
        if before.get(name) != after.get(name)
    }


class ImportRecorder(SocketChannel):
    """A worker process's line to its agent, which tells the agent once what has been imported.

    That is after the first report: by then a training function has what it needs, and another
    attempt needs the same.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._modules: frozenset[str] | None = frozenset(sys.modules)
        self._path = list(sys.path)
        self._before = dict(os.environ)
        self._variables: dict[str, str | None] = {}

    def send(self, *messages: Message) -> None:
        super().send(*messages)
        if self._modules is None:
            return
        match messages[0][0]:
            case "offer":
                # What the collective needs from here on differs between ranks and attempts.
                self._variables = changed(self._before, os.environ)
            case "joined":
                self._before = dict(os.environ)
            case "report":
                modules = [name for name in _installed_modules() if name not in self._modules]
                self._modules = None
                if len(modules) >= _WORTH_IT and sys.path == self._path:
                    variables = {**self._variables, **changed(self._before, os.environ)}
                    super().send(imported_message(modules, variables))


def _installed_modules() -> list[str]:
    found = []
    for name, module in list(sys.modules.items()):
        # Some modules import others when they are asked for an attribute: these aren't asked.
        with contextlib.suppress(AttributeError):
            spec = object.__getattribute__(module, "__dict__").get("__spec__")
            # Ray has threads and connections of its own: a worker process imports it itself.
            if spec.name == name and is_installed(spec.origin or "") and not _is_ray(name):
                found.append(name)
    return found


def _is_ray(name: str) -> bool:
    return name.partition(".")[0] == "ray"


def preload(preload_request: PreloadRequest) -> dict[str, str] | None:
    """Import what a lesson says, in this process.

    Returns:
        Variables that this has set, which forks need as well; None if what is forked from this
        process now would not be what the first worker process was, or could not work.
    """
    os.environ.clear()
    common = {k: v for k, v in preload_request.environment.items() if _OF_ONE_WORKER not in k}
    os.environ.update(preload_environment(common))
    with contextlib.suppress(OSError):  # the driver's directory may not exist on this node
        os.chdir(preload_request.directory)
    before, held = dict(os.environ), open_files()
    for module in preload_request.modules:
        # Not all that is in `sys.modules` can be imported by its name.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if any(os.environ.get(name) != value for name, value in preload_request.variables.items()):
        # The function has set it, and its imports may depend on that.
        return None
    if thread_count() > 1 or holds_device() or has_children() or open_files() != held:
        return None
    if "ray" in sys.modules:
        return None
    return {
        name: value
        for name, value in changed(before, os.environ).items()
        if value is not None and _OF_ONE_WORKER not in name
    }
