"""The backend that `polytrain new-backend` writes, one method broken at a time: the kit names it.

Of mistakes that break several things, the first test to look at is named here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "core/src/polytrain/view/backend_template/src"
MODULE = Path(__file__).with_name("broken_methods_in_kit.py")

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]

MEANT: Mapping[str, tuple[str, str]] = {
    "ClaimsExactScaling": (
        "capabilities",
        "test_any_number_of_workers_ends_in_the_same_files",
    ),
    "DoesNotClaimToTrain": ("capabilities", "test_declares_what_it_has[declarative]"),
    "DoesNotClaimToPredict": ("capabilities", "test_declares_what_it_has[predictive]"),
    "HoldsALock": ("options", "test_is_a_value"),
    "NamesNoOption": ("mutable_on_resume", "test_is_a_value"),
    "ImportsTheLibraryInTheDriver": ("problems", "test_driver_half_imports_no_framework"),
    "RefusesTheDeviceThatItClaims": ("problems", "test_gpu"),
    "WantsEveryRowOnEveryRank": ("demand", "test_declarative_run_survives_a_kill"),
    "CountsTooFewSteps": ("total_steps", "test_declarative_run_survives_a_kill"),
    "CountsHalfSteps": ("total_steps", "test_declarative_run_survives_a_kill"),
    "LeaksAPort": ("offering", "test_leaving_frees_every_port"),
    "ListensForEverybody": ("offering", "test_no_port_is_open_to_others"),
    "HasAHelperListenForEverybody": ("offering", "test_no_port_is_open_to_others"),
    "ListensAtAFixedPort": ("offering", "test_no_port_is_fixed"),
    "LeaksAVariable": ("offering", "test_leaving_restores_the_environment"),
    "SkipsTheJoin": ("joined", "test_every_rank_ends_in_the_same_model"),
    "LeavesAProcess": ("joined", "test_leaving_ends_every_process"),
    "NeedsTwoRanks": ("joined", "test_inline"),
    "SumsNothing": ("sum_over_ranks", "test_collective_spans_the_world"),
    "SumsInFloat32": ("sum_over_ranks", "test_what_rank_0_sends_reaches_every_rank"),
    "GathersInReverse": ("gather_over_ranks", "test_what_rank_0_sends_reaches_every_rank"),
    "CutsWhatItGathers": ("gather_over_ranks", "test_what_rank_0_sends_reaches_every_rank"),
    "DropsTheLastBatch": ("train", "test_every_row_is_in_the_model"),
    "AveragesMeans": ("train", "test_each_row_counts_alike"),
    "TrainsAlone": ("train", "test_every_rank_ends_in_the_same_model"),
    "StartsFromTheBeginning": ("train", "test_saved_model_is_loaded_by_another_process"),
    "ReportsOnRank0Alone": ("train", "test_declarative_training"),
    "CountsStepsFrom0": ("train", "test_declarative_training"),
    "ForgetsTheRounds": ("save", "test_saved_model_is_loaded_by_another_process"),
    "SavesTheTime": ("save", "test_every_rank_ends_in_the_same_model"),
    "SavesNothing": ("save", "test_every_rank_ends_in_the_same_model"),
    "LoadsAnUntrainedModel": ("load", "test_saved_model_is_loaded_by_another_process"),
    "NeedsAsManyRanks": ("load", "test_saved_model_is_loaded_by_another_process"),
    "LoadsRoundedWeights": ("load", "test_declarative_run_survives_a_kill"),
    "LoadsOnceOnly": ("load", "test_rows_are_predicted_each_by_itself"),
    "PredictsByTheBatch": ("predict", "test_rows_are_predicted_each_by_itself"),
    "PredictsInOrderOfSize": ("predict", "test_rows_are_predicted_each_by_itself"),
    "ReadsColumnsByTheirPlace": ("model_columns", "test_rows_are_predicted_each_by_itself"),
}
"""Mistake → the method with it, and the test that is meant for it."""

FIRST = {test: mistake for mistake, (_, test) in reversed(MEANT.items())}
"""Test of the kit → its first mistake: `make test` shows of each test that it finds something."""


def failed(directory: Path, *arguments: str) -> dict[str, list[str]]:
    """Run tests of the kit, and return those that failed, by mistake."""
    report = directory / "report.xml"
    search = [str(TEMPLATE), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [*PYTEST, f"--junitxml={report}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found: dict[str, list[str]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            name = case.get("classname", "").rpartition(".")[2].removeprefix("Test")
            found[name].append(case.get("name", ""))
    return found


@pytest.fixture(scope="module")
def named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, list[str]]:
    """What has failed of the tests that are meant, by mistake that is asked for here."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    tests = [
        f"{MODULE}::Test{mistake}::{test}"
        for mistake, (_, test) in MEANT.items()
        if f"{test_a_mistake_fails_the_test_that_is_meant_for_it.__name__}[{mistake}]" in asked
    ]
    return failed(tmp_path_factory.mktemp("meant"), *tests)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mistake",
    [mistake if mistake in FIRST.values() else only_in_sweep(mistake) for mistake in MEANT],
)
def test_a_mistake_fails_the_test_that_is_meant_for_it(
    mistake: str, named: Mapping[str, list[str]]
) -> None:
    assert named[mistake] == [MEANT[mistake][1]]


@pytest.mark.only_in_sweep
def test_without_a_mistake_none_of_these_tests_fails(tmp_path: Path) -> None:
    """In `make test`, `test_new_backend` has all of the kit pass on the same backend."""
    sound = [f"{MODULE}::TestUntouched::{test}" for test in sorted({t for _, t in MEANT.values()})]
    assert failed(tmp_path, *sound) == {}


def test_the_guide_names_the_same_tests() -> None:
    guide = (ROOT / "docs/writing-a-backend.md").read_text()
    chapter = guide.partition("### Which mistake fails which test")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `?(\w+)`? \| .* \| `(test_[^`]+)` \|$", chapter, re.MULTILINE)
    assert {*rows} == {*MEANT.values()}
