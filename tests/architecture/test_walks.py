"""ARCHITECTURE.md's walks follow the real thing: a run that is profiled enters what they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.architecture.test_page import ROOT, WALKS
from tests.benchmarks.entered_code import killed_once, profiled

from polytrain import ScalingConfig

SOURCE = "core/src/polytrain/"
IN_OTHER_PROCESSES = {"Zygote.serve", "run_worker"}
"""Entered by the zygote and by worker processes, where nothing profiles."""


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """File and name of all that two runs enter: one on this machine, and an inline one."""
    with profiled() as calls:
        for number, scaling in enumerate(
            (ScalingConfig(num_workers=2, cluster="local"), ScalingConfig(num_workers=0))
        ):
            directory = tmp_path_factory.mktemp("runs") / str(number)
            directory.mkdir()
            killed_once("reference", directory, scaling)
    root = str(ROOT / SOURCE)
    return {(str(Path(code.co_filename).relative_to(root)), code.co_qualname) for _, code in calls}


@pytest.mark.parametrize(("title", "steps"), WALKS, ids=[title for title, _ in WALKS])
def test_a_run_enters_what_a_walk_names(
    title: str, steps: str, entered: set[tuple[str, str]]
) -> None:
    for line in steps.splitlines():
        file, *names = re.findall(r"`([\w./]+)`", line.partition(": ")[0]) or [""]
        for name in names if file.startswith(SOURCE) else ():
            path = file.removeprefix(SOURCE)
            is_entered = any(at == path and f"{it}.".startswith(f"{name}.") for at, it in entered)
            is_other = name in IN_OTHER_PROCESSES or name.endswith(".py")
            assert is_entered or is_other, f"{line}: no run enters {name}"
