"""Notes to errors of users' functions whose modules the node of a process doesn't have. Pure."""

from __future__ import annotations

THIS_MACHINE = "127.0.0.1"
"""The address of workers that run on the driver's machine, without Ray."""

_REMEDY = (
    "install it on that node, or copy it there beside the script; or submit the script's folder, "
    "which Ray copies to every node: ray job submit --working-dir . -- python SCRIPT"
)


def note_unreadable(error: BaseException, what: str, host: str) -> None:
    """Add a note to the error of unpickling.

    Args:
        error: the error.
        what: what couldn't be unpickled, as the subject of a sentence.
        host: the address of the process's node.
    """
    if host == THIS_MACHINE:
        error.add_note(
            f"{what} could not be read in the worker process. Modules that it uses must be "
            "installed, or lie beside the script."
        )
    elif isinstance(error, ModuleNotFoundError):
        error.add_note(
            f"{what} could not be read on {host}, which doesn't have the module {error.name!r}: "
            f"{_REMEDY}."
        )
    else:
        error.add_note(f"{what} could not be read on {host}.")


def note_missing_module(error: BaseException, host: str) -> None:
    """Add a note to an exception of a training function that imports a module its node lacks.

    Args:
        error: the exception.
        host: the address of the rank's node. It isn't named: equal errors of all ranks, which are
            a bug, must have equal messages.
    """
    if isinstance(error, ModuleNotFoundError) and host != THIS_MACHINE:
        error.add_note(
            f"If other nodes have the module {error.name!r}, this rank's lacks it: {_REMEDY}."
        )
