"""Functions that do something else have other fingerprints, and no others have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from polytrain.functions.code_fingerprint import code_fingerprint

SCRIPT = """
import math
EPOCHS = 3

def helper(x):
    return x + 1

class Net:
    def forward(self, x):
        return helper(x)

def train(config, rate=0.1):
    names = {"a", "b", "c"}
    for epoch in range(EPOCHS):
        Net().forward(math.sqrt(config["x"]) * rate)
        if config["x"] in {"one", "two", "three"}:
            [value for value in names]
"""


def of(script: str) -> str:
    """The fingerprint that a script's function has in a process of its own."""
    code = f"""{script}
from polytrain.functions.code_fingerprint import code_fingerprint
print(code_fingerprint(train))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def unchanged() -> str:
    return of(SCRIPT)


@pytest.mark.parametrize(
    "edit",
    [
        lambda script: script,
        lambda script: f"\n\n# A comment.{script}",
        lambda script: script.replace("    return x + 1", "    # why\n\n    return x + 1"),
        lambda script: script.replace("EPOCHS = 3", "OTHER = 5\nEPOCHS = 3"),
    ],
)
def test_another_process_or_place_in_the_file_changes_nothing(
    unchanged: str, edit: Callable[[str], str]
) -> None:
    assert of(edit(SCRIPT)) == unchanged


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("EPOCHS = 3", "EPOCHS = 4"),
        ("return x + 1", "return x + 2"),
        ("return helper(x)", "return helper(x) + 1"),
        ("rate=0.1", "rate=0.2"),
        ("math.sqrt", "math.exp"),
        ('config["x"]', 'config["y"]'),
        ("* rate", "+ rate"),
        ('"three"', '"four"'),
        ("range(EPOCHS)", "range(EPOCHS - 1)"),
    ],
)
def test_a_change_of_what_it_does_is_seen(unchanged: str, before: str, after: str) -> None:
    assert before in SCRIPT
    assert of(SCRIPT.replace(before, after)) != unchanged


def closure(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


class Callable_:
    """An object that is called."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self) -> float:
        """Train."""
        return self.factor

    def method(self) -> float:
        """Train as well."""
        return self.factor * 2


def recursive(depth: int) -> int:
    return recursive(depth - 1) if depth else 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (closure(1), closure(2)),
        (closure(closure(1)), closure(closure(2))),
        (partial(closure, 1), partial(closure, 2)),
        (Callable_(1.0), Callable_(2.0)),
        (Callable_(1.0).method, Callable_(2.0).method),
        (Callable_(1.0).method, Callable_(1.0)),
        (recursive, closure),
        (None, recursive),
        ({"callbacks": [closure(1)]}, {"callbacks": [closure(2)]}),
    ],
)
def test_what_a_function_holds_counts(one: Any, other: Any) -> None:
    assert code_fingerprint(one) == code_fingerprint(one)
    assert code_fingerprint(one) != code_fingerprint(other)


def test_builtin_functions_are_known_by_their_names() -> None:
    assert code_fingerprint(len) == code_fingerprint(len)
    assert code_fingerprint(len) != code_fingerprint(print)


def test_long_bytes_differ_by_what_is_in_them() -> None:
    weights = bytes(1 << 20)
    others = weights[:-1] + b"1"
    fingerprints = {code_fingerprint([value]) for value in (weights, others, bytes(weights))}
    assert len(fingerprints) == 2
