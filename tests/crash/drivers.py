"""Drivers that are made to be killed: forks of this process, which has imported everything."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from tests.crash.scenarios import Scenario, fit
from tests.crash.tracing import Plan, watch

_LONGEST_S = 120
"""Seconds after which a driver counts as hung."""

TEMPORARY = "tmp"
"""In a case's directory: what its drivers take for the directory of temporary files."""

_KILLED = (signal.SIGKILL, signal.SIGXFSZ)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a driver has ended."""

    how: Literal["returned", "killed", "failed", "hung"]
    log: str
    """What it has written to its standard error."""


def drive(
    scenario: Scenario,
    directory: Path,
    *,
    plan: Plan | None = None,
    connect: Callable[[], None] | None = None,
) -> Ended:
    """Call `fit()` in a process of its own, and wait for its end.

    Args:
        scenario: what to run.
        directory: of the case; the run is resumed if there is one in it.
        plan: what the driver's own process has to do.
        connect: called in the driver, to reach a cluster.
    """
    log = directory / "log"
    with log.open("ab") as output:
        start = output.tell()
        pid = os.fork()
        if pid == 0:
            _become_driver(scenario, directory, output.fileno(), plan, connect)
    _, status = os.waitpid(pid, 0)
    return Ended(how=_how(status), log=log.read_bytes()[start:].decode(errors="replace"))


def warm_up(scenarios: Iterable[Scenario], directory: Path) -> None:
    """Import what drivers import when they run, so that those to come needn't.

    Args:
        scenarios: are run once each, in processes of their own.
        directory: for what they write.
    """
    for number, scenario in enumerate(scenarios):
        place = directory / f"warm-up-{number}"
        place.mkdir()
        pid = os.fork()
        if pid == 0:
            _tell_modules(scenario, place)
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError(f"{scenario.name}: it doesn't even run undisturbed")
        for module in (place / "modules").read_text().splitlines():
            # Some are known by names under which they can't be found.
            with contextlib.suppress(Exception):
                importlib.import_module(module)


def _tell_modules(scenario: Scenario, directory: Path) -> NoReturn:
    code = 1
    try:
        fit(scenario, directory)
        (directory / "modules").write_text("\n".join(sys.modules))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _how(status: int) -> Literal["returned", "killed", "failed", "hung"]:
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "returned"
    if -code in _KILLED:
        return "killed"
    return "hung" if -code == signal.SIGALRM else "failed"


def _become_driver(
    scenario: Scenario,
    directory: Path,
    output: int,
    plan: Plan | None,
    connect: Callable[[], None] | None,
) -> NoReturn:
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Whoever is killed leaves temporary files behind: they go with the case.
        temporary = directory / TEMPORARY
        temporary.mkdir(exist_ok=True)
        tempfile.tempdir = str(temporary)
        signal.alarm(_LONGEST_S)
        if connect is not None:
            connect()
        if plan is not None:
            watch(plan, "driver")
        fit(scenario, directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
