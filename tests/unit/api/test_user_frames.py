"""What an interruption shows: the user's lines, and none of polytrain's."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import polytrain
import polytrain_plugins
from polytrain.functions.users_code import user_frames_only

FIT = """
@user_frames_only
def fit(function):
    inner(function)

def inner(function):
    function()
"""


def compiled(file: Path) -> Callable[[Callable[[], None]], None]:
    """A `fit` whose lines are in a file of polytrain's."""
    names: dict[str, Any] = {"user_frames_only": user_frames_only}
    exec(compile(FIT, str(file), "exec"), names)
    made: Callable[[Callable[[], None]], None] = names["fit"]
    return made


fit = compiled(Path(polytrain.__file__).parent / "api" / "trainer.py")


def interrupt() -> None:
    raise KeyboardInterrupt


def call_of_the_library() -> None:
    """As an observer or `report` calls back into polytrain."""
    fit(lambda: threading.Thread.run(Interrupted()))


class Interrupted(threading.Thread):
    def __init__(self) -> None:
        super().__init__(target=interrupt)


def frames(function: Callable[[], None]) -> list[str]:
    with pytest.raises((KeyboardInterrupt, ValueError)) as raised:
        function()
    return [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]


@pytest.mark.parametrize(("package", "file"), [(polytrain, "run"), (polytrain_plugins, "registry")])
def test_what_polytrain_raises_shows_the_call_alone(package: ModuleType, file: str) -> None:
    def run() -> None:
        fit(compiled_raise)

    names: dict[str, Callable[[], None]] = {}
    path = Path(str(package.__file__)).with_name(f"{file}.py")
    exec(compile("def raise_it():\n    raise KeyboardInterrupt", str(path), "exec"), names)
    compiled_raise = names["raise_it"]
    assert frames(run) == ["frames", "run"]


def test_what_the_users_function_raises_shows_its_line_too() -> None:
    assert frames(lambda: fit(interrupt)) == ["frames", "<lambda>", "interrupt"]


def test_libraries_are_shown_where_the_user_calls_them_and_not_where_polytrain_does() -> None:
    assert frames(call_of_the_library) == [
        "frames",
        "call_of_the_library",
        "<lambda>",
        "run",
        "interrupt",
    ]
    assert frames(lambda: fit(threading.Thread(target=interrupt).run)) == [
        "frames",
        "<lambda>",
        "interrupt",
    ]


def test_an_error_keeps_its_whole_traceback() -> None:
    def wrong() -> None:
        raise ValueError

    assert "inner" in frames(lambda: fit(wrong))
