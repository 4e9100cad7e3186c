"""What is learned of a trainer's imports, and what a zygote makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.functions.users_code import is_installed
from polytrain.workers.processes.preload import changed

VARIABLES = st.dictionaries(st.sampled_from("ABCD"), st.sampled_from("123"))

STUDY = """
import json, sys
from polytrain.workers.processes.preload import PreloadRequest, preload

sys.path[:0] = [".", "site-packages"]
preload_request = PreloadRequest(
    modules=("missing", "library", *json.loads(sys.argv[2])),
    variables=json.loads(sys.argv[1]),
    environment={"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3"},
    directory=".",
)
outcome = preload(preload_request)
if isinstance(outcome, PreloadRequest):
    outcome = {"again": [outcome.modules, outcome.variables, outcome.is_second]}
print(json.dumps(outcome), "library" in sys.modules)
"""


@given(before=VARIABLES, after=VARIABLES)
def test_what_has_changed_makes_of_the_old_variables_the_new(
    before: dict[str, str], after: dict[str, str]
) -> None:
    changes = changed(before, after)
    assert {k: v for k, v in {**before, **changes}.items() if v is not None} == after
    assert all(before.get(name) != value for name, value in changes.items())


def test_libraries_are_installed_and_scripts_are_not(tmp_path: Path) -> None:
    assert is_installed(os.path.abspath(numpy.__file__))
    assert is_installed(json.__file__)
    assert is_installed("/usr/lib/python3/dist-packages/six.py")
    assert not is_installed(str(tmp_path / "train.py"))
    assert not is_installed(__file__)
    assert not is_installed("built-in")


def preload(directory: Path, library: str, *others: str, **variables: str) -> dict[str, Any] | None:
    """What a process of its own says to this library, which a trainer has imported, and others."""
    (directory / "site-packages").mkdir(exist_ok=True)
    (directory / "site-packages" / "library.py").write_text(library)
    script = [sys.executable, "-c", STUDY, json.dumps(variables), json.dumps(others)]
    run = subprocess.run(script, cwd=directory, capture_output=True, text=True, check=True)
    answer, _, imported = run.stdout.strip().rpartition(" ")
    assert imported == "True"
    sets: dict[str, Any] | None = json.loads(answer)
    return sets


def test_what_a_library_sets_is_set_for_forks_too(tmp_path: Path) -> None:
    sets = "import os; os.environ.update(LIBRARY='yes', CUDA_VISIBLE_DEVICES='0')"
    assert preload(tmp_path, sets, LIBRARY="yes") == {"LIBRARY": "yes"}


def test_what_would_start_threads_of_openblas_is_imported_without_them(tmp_path: Path) -> None:
    """Forks start as many as each of them is to have."""
    assert preload(tmp_path, "import numpy") == {}


def test_what_only_the_function_has_set_is_none_of_the_zygotes(tmp_path: Path) -> None:
    assert preload(tmp_path, "", LIBRARY="yes") is None


def test_devices_of_one_rank_are_not_seen_by_what_is_imported_for_all(tmp_path: Path) -> None:
    library = "import os; os.environ['SEEN'] = os.environ.get('CUDA_VISIBLE_DEVICES', 'none')"
    assert preload(tmp_path, library) == {"SEEN": "none"}


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"

FAULTS = pytest.mark.parametrize(
    "library",
    [
        THREAD,
        "import subprocess; child = subprocess.Popen(['sleep', '0'])",
        "import socket; connection = socket.socket()",
        "import sys; sys.modules['ray'] = sys",
    ],
    ids=["thread", "process", "connection", "Ray"],
)


@FAULTS
def test_what_a_fork_would_break_is_not_forked(tmp_path: Path, library: str) -> None:
    assert preload(tmp_path, library) is None


def test_what_imports_a_module_beside_the_script_is_imported_by_each_attempt(
    tmp_path: Path,
) -> None:
    """It may be edited before the next attempt."""
    (tmp_path / "beside.py").touch()
    assert preload(tmp_path, "import beside") is None


def others(directory: Path, **code: str) -> list[str]:
    """Modules that a trainer has imported beside the library: these, and enough harmless ones."""
    site = directory / "site-packages"
    site.mkdir()
    for name, text in code.items():
        (site / f"{name}.py").write_text(text)
    harmless = [f"harmless_{number}" for number in range(40)]
    for name in harmless:
        (site / f"{name}.py").touch()
    return [*code, *harmless]


@FAULTS
def test_the_rest_is_imported_without_what_a_fork_would_break(tmp_path: Path, library: str) -> None:
    code = {
        "user": "import harmless_1, library",
        "users_user": "def use():\n    import user\nuse()",
        "waits": "import harmless_2\ndef later():\n    import library",
        "calls": "import waits",
    }
    modules = others(tmp_path, **code)
    kept = [module for module in modules if module not in ("user", "users_user")]
    assert preload(tmp_path, f"import harmless_3\n{library}", *modules) == {
        "again": [["missing", *kept], {}, True]
    }


def test_a_variable_of_a_librarys_own_may_differ_between_processes(tmp_path: Path) -> None:
    modules = others(tmp_path)
    library = "import os, uuid; os.environ['_LIBRARY_SESSION'] = str(uuid.uuid4())"
    outcome = preload(tmp_path, library, *modules, _LIBRARY_SESSION="of the first process")
    assert outcome == {"again": [["missing", *modules], {}, True]}


def test_only_what_is_left_out_sets_its_variables(tmp_path: Path) -> None:
    modules = others(tmp_path, kept="import os; os.environ['OF_KEPT'] = '1'")
    library = f"import os; os.environ['OF_LIBRARY'] = '2'; {THREAD}"
    assert preload(tmp_path, library, *modules, OF_KEPT="1", OF_LIBRARY="2") == {
        "again": [["missing", *modules], {"OF_KEPT": "1"}, True]
    }


@pytest.mark.parametrize("name", ["COLOUR", "HOST", "MY_LIBRARY"])
def test_another_variable_may_be_the_functions_own(tmp_path: Path, name: str) -> None:
    """`HOST` has the name of the module `os` in it."""
    modules = others(tmp_path)
    library = f"import os; os.environ['{name}'] = 'grey'"
    assert preload(tmp_path, library, *modules, **{name: "red"}) is None


def test_a_module_keeps_the_functions_that_it_imports(tmp_path: Path) -> None:
    modules = others(tmp_path)
    library = "from importlib import import_module; import builtins"
    check = f"""
import builtins, importlib
originals = importlib.import_module, builtins.__import__
{STUDY}
import library
assert (library.import_module, builtins.__import__) == originals
assert library.import_module is importlib.import_module
"""
    (tmp_path / "site-packages" / "library.py").write_text(library)
    script = [sys.executable, "-c", check, "{}", json.dumps(modules)]
    subprocess.run(script, cwd=tmp_path, check=True)


def test_what_imports_a_module_beside_the_script_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    modules = others(tmp_path)
    assert preload(tmp_path, "import beside", *modules) == {
        "again": [["missing", *modules], {}, True]
    }
