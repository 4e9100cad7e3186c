"""The card of a backend: what it claims, and what a run of the kit has shown of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from polytrain.backends.reference import Reference
from polytrain.testing import BackendConformance
from polytrain.testing.card import PROOFS, Card, Held, card
from polytrain.testing.chaos import FAULTS, RECOVERIES
from polytrain.testing.outcomes import Outcome
from polytrain.view.cli.conformance import badge, table
from polytrain_plugins import Capabilities


class Exact(Reference):
    """A backend that claims much."""

    capabilities = Capabilities(
        declarative=True, predictive=True, exact_resume=True, virtual_workers=True
    )


def struck(number: int, *recoveries_s: float, end: str = "passed") -> Outcome:
    return Outcome(end=end, seconds=2, properties={FAULTS: number, RECOVERIES: [*recoveries_s]})


PASSED: Mapping[str, Outcome] = {
    **{test: Outcome(seconds=1) for tests in PROOFS.values() for test in tests},
    "test_chaos_in_training": struck(6, 0.5, 0.25),
    "test_chaos_that_does_not_end": struck(3, 2.0),
}


def of(**changed: Outcome) -> Card:
    return card(Exact, {**PASSED, **changed})


def held(found: Card) -> dict[str, str]:
    return {name: str(each.held) for name, each in found.capabilities.items()}


def test_every_capability_has_its_tests_and_they_are_in_the_kit() -> None:
    assert {*PROOFS} == {each.name for each in fields(Capabilities)}
    for tests in PROOFS.values():
        for test in tests:
            assert hasattr(BackendConformance, test.partition("[")[0]), test


def test_what_is_claimed_and_passes_is_held() -> None:
    assert held(of()) == {
        "declarative": "yes",
        "predictive": "yes",
        "exact_resume": "yes",
        "exact_scaling": "not claimed",
        "virtual_workers": "not tested",
        "checkpoint": "yes",
        "devices": "yes",
    }
    assert of().conforms


@pytest.mark.parametrize("end", ["failed", "known failure"])
def test_a_test_that_fails_names_the_capability_that_is_not_held(end: str) -> None:
    found = of(test_chaos_in_training=struck(6, end=end))
    assert found.capabilities["exact_resume"].held is Held.NO
    assert found.capabilities["exact_resume"].failed == ("test_chaos_in_training",)
    assert found.capabilities["declarative"].held is Held.YES
    # A known failure fails no run of tests.
    assert found.conforms == (end == "known failure")
    assert (found.survived, found.faults) == (3, 9)


def test_what_was_left_out_is_not_tested() -> None:
    some = {name: each for name, each in PASSED.items() if name != "test_gpu"}
    assert held(card(Exact, some))["devices"] == "not tested"
    assert not card(Exact, {}).conforms


def test_the_table() -> None:
    assert [*table(of(test_gpu=Outcome(end="failed")))] == [
        "",
        "reference         claimed       held",
        "declarative       yes           yes",
        "predictive        yes           yes",
        "exact_resume      yes           yes",
        "exact_scaling     no",
        "virtual_workers   yes           not tested",
        "checkpoint        rank_0        yes",
        "devices           cpu           no: test_gpu",
        "",
        "faults            9 of 9 survived; next report after 0.50 s (median), 2.00 s (worst)",
        "tests             1 failed, 11 passed",
        "times             contract 6.0 s, trainer 3.0 s, chaos 4.0 s",
    ]


def test_the_badge() -> None:
    assert badge(of()) == {
        "schemaVersion": 1,
        "label": "polytrain conformance",
        "message": "12 passed, 9 faults survived",
        "color": "brightgreen",
    }
    wrong = badge(of(test_gpu=Outcome(end="failed")))
    assert (wrong["message"], wrong["color"]) == ("1 failed", "red")


def on_the_command_line(*arguments: str, tests: str) -> subprocess.CompletedProcess[str]:
    """The kit runs in a process of its own: pytest imports a module of one name once."""
    command = [sys.executable, "-m", "polytrain", "conformance", "reference", "--set=label=label"]
    options = ["-k", tests, "-p", "no:cacheprovider", "-q"]
    return subprocess.run([*command, *arguments, *options], capture_output=True, text=True)


QUICK = "test_gpu or is_a_value or declares"


def test_json_has_stdout_to_itself() -> None:
    ran = on_the_command_line("--format", "json", tests=QUICK)
    found: dict[str, Any] = json.loads(ran.stdout)["data"]
    assert ran.returncode == 0
    assert "4 passed" in ran.stderr
    assert found["tests"] == {"passed": 4}
    assert found["capabilities"]["devices"] == {"claimed": ["cpu"], "held": "yes", "failed": []}
    assert found["capabilities"]["predictive"]["held"] == "not tested"
    assert found["conforms"]


def test_the_card_follows_what_pytest_prints() -> None:
    ran = on_the_command_line(tests=QUICK)
    assert ran.returncode == 0
    assert ran.stdout.index("4 passed") < ran.stdout.index("reference         claimed       held")
    # Such as: assertions of the kit can't be explained, because it was imported too early.
    assert "arning" not in ran.stdout + ran.stderr


def test_a_command_without_tests_prints_no_card() -> None:
    ran = on_the_command_line(tests="no_such_test")
    assert ran.returncode == 5
    assert "claimed" not in ran.stdout
