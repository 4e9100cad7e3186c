"""What travels by value, and what by name."""

from __future__ import annotations

import pickle
import sys
import types
from collections import OrderedDict
from typing import Any

import pytest

from polytrain.workers.pickling import code_of_job, pickled_with


@pytest.mark.parametrize("function", [dict, len, OrderedDict])
def test_what_every_python_has_travels_by_name(function: Any) -> None:
    pickled = pickled_with(function, value={"model": function})
    assert len(pickled) < 100
    assert pickle.loads(pickled)["model"] is function


BACKEND = """
from dataclasses import dataclass
from polytrain.testing.reference import Reference

@dataclass(frozen=True, kw_only=True)
class Own(Reference):
    colour: str = "grey"
"""


def test_a_backend_that_others_cannot_import_travels_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does that is defined in a test file."""
    module = types.ModuleType("no_file_of_this_name")
    with monkeypatch.context() as imported:
        imported.setitem(sys.modules, module.__name__, module)
        exec(BACKEND, vars(module))
        backend = vars(module)["Own"](colour="red")
        pickled = pickled_with(*code_of_job(None, backend), value=backend)
    assert pickle.loads(pickled).colour == "red"
