"""Files of a run are opened, listed and deleted by one module alone, which follows no link."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import polytrain

ROOT = Path(polytrain.__file__).parent

OTHER_ROOMS = {
    "boosting": "model files that the user names",
    "data": "the user's data",
    "view/backend_template": "models, in directories that an engine is given",
    "view/doctor": "a directory of its own, which it makes and deletes",
    "testing": "runs of tests, and what they leave",
    "linux": "/proc, /sys and /dev",
    "backends": "files that a report is made of, as a user would",
}
"""Rooms that touch no run → which files they touch."""

OTHER_FILES = {
    "checkpoint/checkpoint.py": "the copy that the user asks for, of a directory that was checked",
    "output/worker_output.py": "temporary directories of this process",
    "checkpoint/scratch.py": "the node's own directory, which others can't write to",
    "checkpoint/staging.py": "the user's files, and a directory that is given by its descriptor",
    "view/cli/conformance.py": "a temporary directory",
    "view/cli/job_file.py": "modules in the user's working directory",
    "view/cli/new_backend.py": "files of the package, and the directory that the user names",
    "view/cli/report.py": "the page that the user names",
    "view/cli/run.py": "the job file that the user names",
    "view/page/ending.py": "the page that the user names",
    "view/page/rendering.py": "files of the package",
    "prediction/model_files.py": "a model's directory that was checked, and a temporary one",
    "trackers/wandb.py": "the directory that W&B itself writes to",
    "trackers/wandb_file.py": "W&B's own file",
    "record/near_runs.py": "the directory that the user keeps runs in, each of which may be a link",
    "workers/processes/zygote_connection.py": "/proc of a zygote",
    "workers/processes/cache.py": "modules that are imported",
    "workers/processes/named_memory.py": "memory that worker processes share under a name",
    "workers/ray/connection.py": "Ray's own file",
    "workers/ray/cluster.py": "memory that Ray has mapped",
    "workers/session/session.py": "the directory that the user wants to have deleted",
}
"""Modules in the other rooms → which files of nobody's run they touch."""

OF_PATHS = {
    *("read_text", "read_bytes", "write_text", "write_bytes"),
    *("iterdir", "glob", "rglob"),
    *("unlink", "rmdir", "mkdir", "touch", "hardlink_to", "symlink_to", "rename"),
}
OF_OS = {
    *("open", "listdir", "scandir", "walk", "fwalk"),
    *("remove", "unlink", "replace", "rename", "renames", "link", "symlink", "truncate"),
    *("mkdir", "makedirs", "rmdir", "removedirs", "mkfifo"),
}
HARMLESS = {"which", "disk_usage"}
"""Of `shutil`."""

OPEN_THEMSELVES = {
    *("location", "_location", "of", "place", "no_retry", "lock", "parent", "replace"),
    *("pipe", "specs", "next", "self"),
}
"""What else than a path has a method `open()`."""


def touched(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that open, list, change or delete a file by its path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not is_of_the_system(node) and touches(node):
            yield f"{node.lineno}: {ast.unparse(node)}"


def touches(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    owner, name = last_name(function.value), function.attr
    if owner == "fs":
        # A file system of fsspec's.
        return False
    if owner == "shutil":
        return name not in HARMLESS
    if owner == "os":
        return name in OF_OS
    if name == "open":
        arguments = [*call.args, *(each.value for each in call.keywords)]
        return owner not in OPEN_THEMSELVES if not arguments else any(map(is_mode, arguments))
    if name == "replace":
        # That of a text has two.
        return len(call.args) == 1 and owner not in ("self", "workers")
    return name in OF_PATHS


def is_mode(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and bool(
        re.fullmatch(r"[rwaxbt+]+|utf-8", str(argument.value))
    )


def is_of_the_system(call: ast.Call) -> bool:
    """Whether it is about a path that begins with /proc or /dev, as one can see."""
    return bool(re.search(r"\(f?'/(proc|dev)/|\(os\.devnull\b", ast.unparse(call)))


def last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return last_name(function)
    return ""


MODULES = {
    path.relative_to(ROOT).as_posix(): path
    for path in sorted(ROOT.rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(tuple(f"{room}/" for room in OTHER_ROOMS))
}


def test_files_of_runs_are_touched_by_one_module_alone() -> None:
    found = {
        name: calls
        for name, path in MODULES.items()
        if name != "storage/beneath.py" and (calls := [*touched(ast.parse(path.read_text()))])
    }
    assert {*found} == {*OTHER_FILES}, {
        name: calls for name, calls in found.items() if name not in OTHER_FILES
    }


@pytest.mark.parametrize(
    "call",
    [
        "open(path)",
        "path.open()",
        "(root / name).open('rb')",
        "path.open(encoding='utf-8')",
        "os.open(path, flags)",
        "Path(root, name).read_text()",
        "path.write_bytes(data)",
        "path.unlink(missing_ok=True)",
        "directory.iterdir()",
        "directory.glob('*')",
        "os.scandir(directory)",
        "os.walk(directory)",
        "shutil.rmtree(directory)",
        "shutil.copyfile(path, other)",
        "path.replace(other)",
        "os.replace(path, other)",
        "unfinished.rename(path)",
        "path.mkdir(parents=True)",
    ],
)
def test_a_call_that_goes_by_a_path_is_found(call: str) -> None:
    assert [*touched(ast.parse(call))] == [f"1: {call}"]
