"""Checks the options `script`, `module` and `args`, without importing torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain_plugins import Job, Problem
from polytrain_plugins.close_names import did_you_mean_file
from polytrain_plugins.type_names import a_type

if TYPE_CHECKING:
    from polytrain_torch.backend import Torch
    from polytrain_torch.scripts.runner import Script


def has_script(options: Torch) -> bool:
    """Whether workers run a script or a module in place of a training function."""
    return options.script is not None or options.module is not None


def script_of(options: Torch, *, max_failures: int) -> Script | None:
    """Return the program that workers run; None if options name neither a script nor a module.

    Args:
        options: the user's options, even wrong ones: `script_problems` reports those.
        max_failures: the run's maximum number of failures; below 0 for any number.
    """
    from polytrain_torch.scripts.runner import Script

    if not has_script(options):
        return None
    path = _path(options.script)
    return Script(
        name=str(options.module if path is None else options.script),
        path=path,
        source=b"" if path is None else _text(path),
        directory=os.getcwd() if path is None else str(path.resolve().parent),
        args=tuple(map(str, options.args)),
        max_restarts=max_failures,
    )


def script_problems(options: Torch, job: Job) -> Iterator[Problem]:
    """Yield all problems of the options of a script."""
    if options.script is not None:
        yield from _file_problems(options.script)
    if options.module is not None:
        yield from _module_problems(options.module)
    yield from _argument_problems(options.args)
    if not has_script(options):
        if options.args != ():
            yield Problem(
                field="args",
                what="there is no script to pass them to",
                remedy="Pass script=… too; a training function gets train_loop_config",
            )
        return
    given = "script" if options.script is not None else "module"
    if options.script is not None and options.module is not None:
        yield Problem(
            field="module",
            what="there is a script too, and a run has one of them",
            remedy="Leave one of them out",
        )
    if job.has_training_function:
        yield Problem(
            field=given,
            what="there is a training function too, and a run has one of them",
            remedy=f"Leave {given} out, or the training function",
        )
    if job.datasets:
        yield Problem(
            field="datasets",
            what=f"{_names_of(job)}: a script reads its own data",
            remedy=f"Leave datasets out, or use a training function in place of {given}",
        )
    if options.process_group is not None:
        yield Problem(
            field="process_group",
            what=f"it is {options.process_group!r}, and a script makes its own process group",
            remedy="Leave it out, and choose it in the script: init_process_group(…)",
        )


def _path(script: Any) -> Path | None:
    """Return the absolute path of a script, as Python makes `__file__`; None if it is no path."""
    is_path = isinstance(script, str | os.PathLike) and os.fspath(script)
    if is_path and "\0" not in os.fspath(script):
        return Path(os.path.abspath(os.fspath(script)))
    return None


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # `script_problems` reports it
        return b""


def _file_problems(script: Any) -> Iterator[Problem]:
    path = _path(script)
    if path is None:
        yield Problem(
            field="script",
            what=f"{script!r} is not a path",
            remedy='Give the path of a Python file, such as "train.py"',
        )
    elif not path.exists():
        yield Problem(
            field="script",
            what=f"there is no file {str(script)!r} in {os.getcwd()}"
            if not os.path.isabs(script)
            else f"there is no file {str(script)!r}",
            remedy=f"{did_you_mean_file(Path(script))}Give its path from the working directory, "
            "or an absolute one",
        )
    elif not path.is_file():
        yield Problem(
            field="script",
            what=f"{str(script)!r} is a directory",
            remedy='Give the Python file in it, or use module="…" for a package, as python -m does',
        )
    else:
        yield from _syntax_problems(script, path)


def _syntax_problems(script: Any, path: Path) -> Iterator[Problem]:
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        yield Problem(field="script", what=f"it can't be read: {error}", remedy="Make it readable")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        yield Problem(
            field="script",
            what=f"{str(script)!r} is not Python{where}: {getattr(error, 'msg', error)}",
            remedy="Mend it; other programs can't be run",
        )


def _module_problems(module: Any) -> Iterator[Problem]:
    if isinstance(module, str) and module.endswith(".py"):
        yield Problem(
            field="module",
            what=f"{module!r} is a file's name",
            remedy=f"Give script={module!r}, or the module's name: {module[:-3]!r}",
        )
    elif not isinstance(module, str) or not all(map(str.isidentifier, module.split("."))):
        yield Problem(
            field="module",
            what=f"{module!r} is not a module's name",
            remedy='Give what python -m would get, such as "package.train"',
        )
    # Only the outermost package: finding a submodule would import it.
    elif PathFinder.find_spec(module.partition(".")[0], [os.getcwd(), *sys.path]) is None:
        yield Problem(
            field="module",
            what=f"there is no module {module.partition('.')[0]!r} on sys.path or in {os.getcwd()}",
            remedy='Install it, or give the file: script="…/train.py"',
        )


def _argument_problems(args: Any) -> Iterator[Problem]:
    if isinstance(args, str) or not isinstance(args, list | tuple):
        # Don't show the arguments: one of them may be a secret key.
        yield Problem(
            field="args",
            what=f"it is {a_type(args)}, not a list of strings",
            remedy=f"Give a list with one string for each argument, such as {['--epochs', '3']!r}",
        )
        return
    for position, argument in enumerate(args):
        if not isinstance(argument, str | os.PathLike):
            yield Problem(
                field=f"args[{position}]",
                what=f"{argument!r} is not a string",
                remedy=f"Give {str(argument)!r}",
            )


def _names_of(job: Job) -> str:
    return ", ".join(map(repr, job.datasets))
