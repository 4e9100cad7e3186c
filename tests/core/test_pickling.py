"""What travels by value, and what by name."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest

from polytrain.workers.pickling import pickled_with


@pytest.mark.parametrize("function", [dict, len, OrderedDict])
def test_what_every_python_has_travels_by_name(function: Any) -> None:
    pickled = pickled_with(function, value={"model": function})
    assert len(pickled) < 100
    assert pickle.loads(pickled)["model"] is function
