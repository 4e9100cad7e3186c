"""Which node lacks a module, and what to do about it."""

from __future__ import annotations

import pytest

from polytrain.functions.pickling import note_missing_module, note_unreadable

WHAT = "The training function"


def test_a_module_that_another_node_lacks_is_missed_on_that_node() -> None:
    """It lies beside the script where the driver is."""
    error = ModuleNotFoundError("No module named 'beside'", name="beside")
    note_unreadable(error, WHAT, "10.77.0.3")
    [note] = error.__notes__
    assert "10.77.0.3, which doesn't have the module 'beside'" in note
    assert "on that node" in note
    assert "ray job submit --working-dir ." in note
    assert "every node, or" not in note


def test_where_there_is_one_machine_no_other_is_spoken_of() -> None:
    error = ModuleNotFoundError("No module named 'beside'", name="beside")
    note_unreadable(error, WHAT, "127.0.0.1")
    note_missing_module(error, "127.0.0.1")
    [note] = error.__notes__
    assert "beside the script" in note
    assert "node" not in note
    assert "ray" not in note


def test_an_import_inside_of_the_function_has_the_same_remedy_on_every_rank() -> None:
    notes = []
    for host in ("10.77.0.2", "10.77.0.3"):
        error = ModuleNotFoundError("No module named 'beside'", name="beside")
        note_missing_module(error, host)
        notes += error.__notes__
    assert "ray job submit --working-dir ." in notes[0]
    # A policy compares the messages of ranks: what all of them raise is a bug.
    assert notes[0] == notes[1]


@pytest.mark.parametrize("error", [AttributeError("no"), ValueError("no")])
def test_other_errors_are_about_no_module(error: Exception) -> None:
    note_missing_module(error, "10.77.0.3")
    note_unreadable(error, WHAT, "10.77.0.3")
    assert error.__notes__ == ["The training function could not be read on 10.77.0.3."]
