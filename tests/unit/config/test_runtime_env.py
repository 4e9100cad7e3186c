"""The runtime environment of validations: the workers' one, with parts of their own."""

from __future__ import annotations

from typing import Any

import pytest

from polytrain.config.runtime_env import runtime_env_of_validations

MERGED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "nothing": (None, None, {}),
    "the workers' alone": ({"working_dir": "s3://a.zip"}, None, {"working_dir": "s3://a.zip"}),
    "their own alone": (None, {"pip": ["a"]}, {"pip": ["a"]}),
    "variables of both": (
        {"env_vars": {"A": "1", "B": "1"}},
        {"env_vars": {"B": "2"}},
        {"env_vars": {"A": "1", "B": "2"}},
    ),
    "no variables of their own": (
        {"env_vars": {"A": "1"}},
        {"env_vars": None, "pip": ["a"]},
        {"env_vars": {"A": "1"}, "pip": ["a"]},
    ),
    "a part of both": ({"pip": ["a"]}, {"pip": ["b"]}, {"pip": ["b"]}),
    # Ray takes one of them.
    "a different Python": (
        {"pip": ["a"], "py_modules": ["s3://b.zip"]},
        {"conda": "c"},
        {"py_modules": ["s3://b.zip"], "conda": "c"},
    ),
}


@pytest.mark.parametrize(("workers", "own", "expected"), MERGED.values(), ids=MERGED)
def test_a_part_of_their_own_comes_before_the_workers(
    workers: Any, own: Any, expected: dict[str, Any]
) -> None:
    assert runtime_env_of_validations(workers, own) == expected
