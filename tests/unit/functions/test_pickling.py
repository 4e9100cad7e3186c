"""What travels by value, and what by name; and that code keeps its file and lines."""

from __future__ import annotations

import linecache
import pickle
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import cloudpickle
import pytest

from polytrain.functions.pickling import code_of_job, dumps, pickled_error, pickled_with
from polytrain.functions.return_values import encoded


@pytest.mark.parametrize("function", [dict, len, OrderedDict])
def test_what_every_python_has_travels_by_name(function: Any) -> None:
    pickled = pickled_with(function, value={"model": function})
    assert len(pickled) < 100
    assert pickle.loads(pickled)["model"] is function


CACHED = """
import functools

@functools.cache
def factorial(number):
    return number * factorial(number - 1) if number else 1

class Model:
    @functools.lru_cache(maxsize=3, typed=True)
    def size(self, number):
        return factorial(number)

    @functools.cached_property
    def seven(self):
        return factorial(7)

def train():
    model = Model()
    sizes = factorial(4), model.size(5), model.seven, vars(model)["seven"]
    return sizes, Model.size.cache_parameters()
"""


def test_a_function_with_a_cache_travels_as_one_without() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CACHED, names)
    pickled = pickled_with(names["train"], value=names["train"])
    names["factorial"](4)
    again = pickle.loads(pickled)
    assert again() == ((24, 120, 5040, 5040), {"maxsize": 3, "typed": True})
    assert again.__globals__["factorial"] is not names["factorial"]
    # One of a module that all have travels by name.
    assert pickle.loads(dumps(urlsplit)) is urlsplit


BACKEND = """
from dataclasses import dataclass
from polytrain.backends.reference import Reference

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


class _PickledWithin:
    """Pickles a function of its module while it is pickled, as another thread may."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return bytes, (pickled_with(self.function, value=self.function),)


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_module_travels_by_value_while_several_pickle_it(
    monkeypatch: pytest.MonkeyPatch, is_registered: bool
) -> None:
    module = types.ModuleType("no_file_of_this_name")
    exec("def seven(): return 7", vars(module))
    seven = vars(module)["seven"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if is_registered:
        cloudpickle.register_pickle_by_value(module)
    pickled = pickled_with(seven, value=[_PickledWithin(seven), seven])
    assert (module.__name__ in cloudpickle.list_registry_pickle_by_value()) == is_registered
    if is_registered:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, module.__name__)
    within, without = pickle.loads(pickled)
    assert (pickle.loads(within)(), without()) == (7, 7)


CELL = """
class Model:
    @property
    def size(self):
        return [each + 1 for each in (lambda: [1])()]

def outer():
    factor = 2
    def train(config=None, model=Model):
        def inner():
            return factor * model().size[0] / 0
        return inner()
    return train

train = outer()
"""


def files_of(code: types.CodeType) -> set[str]:
    """The file names of a code object and all inside it."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {code.co_filename}.union(*map(files_of, inner))


def in_cell(source: str, file: str) -> dict[str, Any]:
    """The names that a cell of a notebook defines: its source is in no file."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    return names


@pytest.fixture
def cell() -> Iterator[dict[str, Any]]:
    file = "/tmp/ipykernel_1/2.py"
    yield in_cell(CELL, file)
    del linecache.cache[file]


@pytest.mark.parametrize("pickled", [lambda value: pickled_with(value=value), dumps])
def test_code_keeps_its_file_wherever_it_is_nested(
    cell: dict[str, Any], pickled: Callable[[Any], bytes]
) -> None:
    train = pickle.loads(pickled(cell["train"]))
    [model] = train.__defaults__[1:]
    assert files_of(train.__code__) == {"/tmp/ipykernel_1/2.py"}
    assert files_of(model.size.fget.__code__) == {"/tmp/ipykernel_1/2.py"}


def test_lines_that_are_in_no_file_are_shown_in_other_processes(cell: dict[str, Any]) -> None:
    code = (
        "import inspect, pickle, sys, traceback\n"
        "train = pickle.load(sys.stdin.buffer)\n"
        "print(inspect.getsource(train))\n"
        "try:\n"
        "    train()\n"
        "except ZeroDivisionError:\n"
        "    print(traceback.format_exc())\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        input=pickled_with(value=cell["train"]),
        check=True,
        capture_output=True,
    ).stdout.decode()
    assert "def train(config=None, model=Model):" in shown
    assert '"/tmp/ipykernel_1/2.py", line 11, in inner\n    return factor *' in shown


def test_errors_and_results_of_a_cells_classes_keep_their_file() -> None:
    file = "/tmp/ipykernel_1/3.py"
    own = in_cell("class Own(Exception):\n    def code(self):\n        return 3\n", file)["Own"]
    pickled = pickled_error(own())
    assert pickled is not None
    returned = encoded({own()}, rank=0, world_size=1)
    for error in (pickle.loads(pickled), *returned.value(rank=0, may_unpickle=True)):
        assert files_of(type(error).code.__code__) == {file}
