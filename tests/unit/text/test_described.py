"""How values are named for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from polytrain.text.described import described, given_fields


class Colour(Enum):
    RED = 1


@dataclass
class Options:
    lr: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    name: str | None = None


class Talkative:
    def __repr__(self) -> str:
        raise AssertionError("nobody may ask for its text")

    __str__ = __repr__


class Lazy:
    @property
    def shape(self) -> Any:
        raise RuntimeError("not computed")


def schedule(step: int) -> float:
    return 1 / step


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), 0.5),
        (2**1023 - 1, 2**1023 - 1),
        (-(2**1023), f"-0x8{'0' * 255}"),
        (np.zeros((3, 4)), "ndarray(3×4)"),
        (pd.DataFrame({"x": [1, 2]}), "DataFrame(2×1)"),
        (schedule, "schedule"),
        (Options, "Options"),
        (Talkative(), "Talkative"),
        (Lazy(), "Lazy"),
        (Colour.RED, "RED"),
        (Path("/data"), "/data"),
        ({"a", "b"}, ["a", "b"]),
        (Options(lr=0.5), {"lr": 0.5}),
        ({"a": (1, None)}, {"a": [1, None]}),
        (b"\xff", "bytes"),
        ("\udcff", "?"),
    ],
)
def test_a_value_is_named(value: Any, text: Any) -> None:
    assert described(value) == text


def test_what_is_long_is_cut() -> None:
    assert described(list(range(1000)))[-2:] == [199, "… 800 more"]
    names = described({str(n): n for n in range(1000)})
    assert (names["199"], names["…"]) == (199, "800 more")
    assert len(described("x" * 10**6)) == 6000


def test_a_value_within_itself_is_named() -> None:
    around: dict[str, Any] = {}
    around["self"] = around
    found = described(around)
    depth = 0
    while isinstance(found, Mapping):
        found, depth = found["self"], depth + 1
    assert found == "dict"
    assert depth < 100


def test_fields_that_are_defaults_are_left_out() -> None:
    assert given_fields(Options(betas=[0.9, 0.99], name="adam")) == {"name": "adam"}
    # The values of an array can't be compared with a default at once.
    given = given_fields(Options(name=np.zeros(2)))  # type: ignore[arg-type]
    assert list(given) == ["name"]
