"""The kit itself: broken backends fail the test that is meant for them, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

from polytrain.backends.reference import Reference
from polytrain.testing import BackendConformance, KnownFailure
from polytrain.testing.contract import kit_table
from polytrain.view.cli import main

IN_CHAOS = {"test_chaos_in_training", "test_chaos_by_chance"}
INTENDED = {
    "TestSkipsTheJoin": {
        "test_each_row_counts_alike",
        "test_every_rank_ends_in_the_same_model",
        "test_what_rank_0_sends_reaches_every_rank",
    },
    "TestDropsTheLastBatch": {"test_every_row_is_in_the_model"},
    "TestLeaksAPort": {"test_leaving_frees_every_port"},
    "TestLeaksAVariable": {"test_leaving_restores_the_environment"},
    "TestForgetsItsPast": IN_CHAOS,
}


def failed_tests_of(name: str, directory: Path, *, tests: str) -> set[str]:
    """The tests that failed in a run of the kit over a broken backend."""
    module = Path(__file__).with_name("broken_backends_in_kit.py")
    report = directory / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests]
    subprocess.run([*command, f"--junitxml={report}", f"{module}::{name}"], capture_output=True)
    return {
        case.get("name", "")
        for case in ET.parse(report).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    }


# In `make test` the tier of faults: `test_broken_methods` has the others' mistakes too.
@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [name if name == "TestForgetsItsPast" else only_in_sweep(name) for name in INTENDED],
)
def test_broken_backend_fails_the_intended_test(name: str, tmp_path: Path) -> None:
    """And no other of its tier and the tiers below."""
    tests = "test" if INTENDED[name] <= IN_CHAOS else "not chaos"
    # The name of its own entry point is "reference": that it isn't found by it is beside the point.
    beside = {"test_is_found_by_its_name"}
    assert failed_tests_of(name, tmp_path, tests=tests) - beside == INTENDED[name]


@pytest.mark.only_in_sweep
@pytest.mark.parametrize(
    "name", [name for name, tests in INTENDED.items() if not tests <= IN_CHAOS]
)
def test_backend_that_breaks_the_contract_still_passes_the_chaos_tier(
    name: str, tmp_path: Path
) -> None:
    assert failed_tests_of(name, tmp_path, tests="chaos") == set()


def test_options_that_do_not_fit_the_kits_data_are_named_as_a_user_gets_them() -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "polytrain", "conformance", "reference"),
            *("--set", "label=y", "-k", "test_declarative_training", "-p", "no:cacheprovider"),
        ],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "The backend refuses the kit's data:" in ran.stdout
    assert "label: the data set 'train' has no column 'y'" in ran.stdout


def test_the_help_names_the_columns_of_the_kits_data(capsys: pytest.CaptureFixture[str]) -> None:
    main(["conformance", "--help"])
    *others, last = kit_table().column_names
    assert f"{', '.join(others)} and {last}." in " ".join(capsys.readouterr().out.split())


def test_overriding_a_standard_test_is_refused() -> None:
    with pytest.raises(TypeError, match="replaces standard tests: test_gpu"):
        type("Overriding", (BackendConformance,), {"test_gpu": lambda self: None})


def test_deleting_a_standard_test_is_refused() -> None:
    with pytest.raises(TypeError, match="replaces standard tests: test_inline"):
        type("Deleting", (BackendConformance,), {"test_inline": None})


def test_known_failure_of_an_unknown_test_is_refused() -> None:
    known = {"test_nonexistent": KnownFailure("no reason", raises=ValueError)}
    with pytest.raises(TypeError, match="test_nonexistent"):
        type("Unknown", (BackendConformance,), {"known_failures": known})


def test_known_failure_that_passes_fails(pytester: pytest.Pytester) -> None:
    """Strict, and for one class only: the mark doesn't reach the other's test."""
    pytester.makepyfile(
        """
        from polytrain.testing import BackendConformance
        from polytrain.testing import KnownFailure
        from polytrain.backends.reference import Reference

        class TestPessimist(BackendConformance):
            backend = Reference(label="label")
            known_failures = {"test_gpu": KnownFailure("it does pass", raises=ValueError)}

        class TestRealist(BackendConformance):
            backend = Reference(label="label")
        """
    )
    result = pytester.runpytest_subprocess("-k", "test_gpu", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, passed=1)


@pytest.mark.parametrize("declared", [True, False])
def test_flag_and_method_must_agree(pytester: pytest.Pytester, declared: bool) -> None:
    """Declared but missing, and present but undeclared, both fail."""
    pytester.makepyfile(
        f"""
        from dataclasses import dataclass
        from polytrain.testing import BackendConformance
        from polytrain.backends.reference import Reference, ReferenceEngine
        from polytrain_plugins import Capabilities, Engine

        class WithoutTrain(ReferenceEngine):
            train = Engine.train

        class Liar(Reference):
            capabilities = Capabilities(declarative={declared})
            def engine(self):
                return WithoutTrain(self) if {declared} else ReferenceEngine(self)

        class TestLiar(BackendConformance):
            backend = Liar(label="label")
            training_function = print
        """
    )
    result = pytester.runpytest_subprocess("-k", "declares_what", "-p", "no:cacheprovider")
    assert result.ret != 0
    methods = "none" if declared else "[[]'train'[]]"
    result.stdout.fnmatch_lines([f"*declarative={declared}, methods of Engine: {methods}*"])


def test_third_party_test_file_is_short() -> None:
    """The file that the documentation tells authors to write is the one that tests XGBoost."""
    text = Path(__file__).with_name("test_xgboost.py").read_text()
    assert len(text.splitlines()) < 10
    assert Reference.name not in text


def test_backends_that_must_be_there_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run can't silently test nothing: the variable names what has to be installed."""
    monkeypatch.setenv("POLYTRAIN_REQUIRED_BACKENDS", "torch,a-backend-of-nobody")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/conformance"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "not installed: a-backend-of-nobody" in run.stdout + run.stderr


@pytest.mark.only_in_sweep
def test_the_chaos_program_runs_a_case_and_prints_the_table() -> None:
    """It starts a Ray of its own. `ChaosTier` has the cases in `make test`."""
    command = [sys.executable, "-m", "polytrain.testing.chaos_cli", Path(__file__).parent]
    options = ["--backend", "xgboost", "--case", "kill rank 1 once joined", "--minutes", "0"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^kill rank 1 once joined +2 +2 ", ran.stdout, re.MULTILINE), ran.stdout
