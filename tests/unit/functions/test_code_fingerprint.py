"""Functions that do something else have other fingerprints, and no others have."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polytrain.functions import object_contents
from polytrain.functions.code_fingerprint import code_fingerprint

SCRIPT = """
import math
EPOCHS = 3

def helper(x):
    return x + 1

class Net:
    def forward(self, x):
        return helper(x)

def train(config, rate=0.1):
    names = {"a", "b", "c"}
    for epoch in range(EPOCHS):
        Net().forward(math.sqrt(config["x"]) * rate)
        if config["x"] in {"one", "two", "three"}:
            [value for value in names]
"""


def of(script: str) -> str:
    """The fingerprint that a script's function has in a process of its own."""
    code = f"""{script}
from polytrain.functions.code_fingerprint import code_fingerprint
print(code_fingerprint(train))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def unchanged() -> str:
    return of(SCRIPT)


@pytest.mark.parametrize(
    "edit",
    [
        lambda script: script,
        lambda script: f"\n\n# A comment.{script}",
        lambda script: script.replace("    return x + 1", "    # why\n\n    return x + 1"),
        lambda script: script.replace("EPOCHS = 3", "OTHER = 5\nEPOCHS = 3"),
    ],
)
def test_another_process_or_place_in_the_file_changes_nothing(
    unchanged: str, edit: Callable[[str], str]
) -> None:
    assert of(edit(SCRIPT)) == unchanged


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("EPOCHS = 3", "EPOCHS = 4"),
        ("return x + 1", "return x + 2"),
        ("return helper(x)", "return helper(x) + 1"),
        ("rate=0.1", "rate=0.2"),
        ("math.sqrt", "math.exp"),
        ('config["x"]', 'config["y"]'),
        ("* rate", "+ rate"),
        ('"three"', '"four"'),
        ("range(EPOCHS)", "range(EPOCHS - 1)"),
    ],
)
def test_a_change_of_what_it_does_is_seen(unchanged: str, before: str, after: str) -> None:
    assert before in SCRIPT
    assert of(SCRIPT.replace(before, after)) != unchanged


def closure(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


class Callable_:
    """An object that is called."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self) -> float:
        """Train."""
        return self.factor

    def method(self) -> float:
        """Train as well."""
        return self.factor * 2


def recursive(depth: int) -> int:
    return recursive(depth - 1) if depth else 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (closure(1), closure(2)),
        (closure(closure(1)), closure(closure(2))),
        (partial(closure, 1), partial(closure, 2)),
        (Callable_(1.0), Callable_(2.0)),
        (Callable_(1.0).method, Callable_(2.0).method),
        (Callable_(1.0).method, Callable_(1.0)),
        (recursive, closure),
        (None, recursive),
        ({"callbacks": [closure(1)]}, {"callbacks": [closure(2)]}),
    ],
)
def test_what_a_function_holds_counts(one: Any, other: Any) -> None:
    assert code_fingerprint(one) == code_fingerprint(one)
    assert code_fingerprint(one) != code_fingerprint(other)


def test_builtin_functions_are_known_by_their_names() -> None:
    assert code_fingerprint(len) == code_fingerprint(len)
    assert code_fingerprint(len) != code_fingerprint(print)


def test_long_bytes_differ_by_what_is_in_them() -> None:
    weights = bytes(1 << 20)
    others = weights[:-1] + b"1"
    fingerprints = {code_fingerprint([value]) for value in (weights, others, bytes(weights))}
    assert len(fingerprints) == 2


def loaded(source: str, *, name: str = "job", **modules: str) -> dict[str, Any]:
    """The variables of a script, which imports other modules of its author's."""
    before = dict(sys.modules)
    try:
        for each, content in {**modules, name: source}.items():
            sys.modules[each] = ModuleType(each)
            exec(textwrap.dedent(content), vars(sys.modules[each]))
        return vars(sys.modules[name])
    finally:
        sys.modules.clear()
        sys.modules.update(before)


def train_in(source: str, **modules: str) -> str:
    return code_fingerprint(loaded(source, **modules)["train"])


@pytest.mark.parametrize(
    ("function", "later"),
    [
        ("import csv\n    return csv.field_size_limit()", "import csv"),
        ("return batch.mean()", "mean = 3.2"),
        ("batch.rate = 3", "rate = 3"),
        ("global count\n    count = 1\n    return count", "count = 1"),
        ("class Inner:\n        size = 3\n        twice = size * 2", "size = 4"),
        ("SEEN.append(batch)", "SEEN = [3]"),
        ("return batch", "CONFIG = {'lr': 0.1}"),
        ("return __name__, __file__", "__file__ = '/elsewhere/job.py'"),
    ],
)
def test_a_variable_that_a_function_does_not_read_makes_no_difference(
    function: str, later: str
) -> None:
    script = f"def train(batch):\n    {function}\n"
    assert train_in(f"{script}\n{later}\n") == train_in(script)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("CONFIG = {'lr': 0.1}", "CONFIG = {'lr': 0.2}"),
        ("CONFIG = {'layers': [3, {4}]}", "CONFIG = {'layers': [3, {5}]}"),
        ("CONFIG = [1, 2]", "CONFIG = (1, 2)"),
        ("CONFIG = [1, [2, 3]]", "CONFIG = [1, 2, [3]]"),
        ("CONFIG = [1, 1.0]", "CONFIG = [1, True]"),
        ("CONFIG = {'f': [len]}", "CONFIG = {'f': [max]}"),
        ("CONFIG = 10**5000", "CONFIG = 10**5000 + 1"),
        ("import numpy as np; CONFIG = np.zeros(3)", "import numpy as np; CONFIG = np.ones(3)"),
        (
            "import numpy as np; CONFIG = np.zeros(3)",
            "import numpy as np; CONFIG = np.zeros((3, 1))",
        ),
        (
            "import numpy as np; CONFIG = np.zeros(2)",
            "import numpy as np; CONFIG = np.zeros(2, 'i8')",
        ),
        (
            "import numpy as np; CONFIG = [np.array(['a', None])]",
            "import numpy as np; CONFIG = [np.array(['b', None])]",
        ),
        (
            "from datetime import date; CONFIG = date(1, 1, 1)",
            "from datetime import date; CONFIG = date(1, 1, 2)",
        ),
        (
            "from pathlib import Path; CONFIG = Path('a')",
            "from pathlib import Path; CONFIG = Path('b')",
        ),
        ("import re; CONFIG = re.compile('a')", "import re; CONFIG = re.compile('b')"),
        ("import numpy as np; CONFIG = np.sin", "import numpy as np; CONFIG = np.cos"),
        ("from math import sqrt as CONFIG", "from math import exp as CONFIG"),
        (
            "from functools import cache\n@cache\ndef CONFIG(): return 1",
            "from functools import cache\n@cache\ndef CONFIG(): return 2",
        ),
        (
            "from enum import Enum\nclass Kind(Enum):\n    A = 1\nCONFIG = Kind.A",
            "from enum import Enum\nclass Kind(Enum):\n    A = 2\nCONFIG = Kind.A",
        ),
        ("class CONFIG:\n    rates = [1]", "class CONFIG:\n    rates = [2]"),
        (
            "class Base:\n    def go(self): return 1\nclass CONFIG(Base): pass",
            "class Base:\n    def go(self): return 2\nclass CONFIG(Base): pass",
        ),
        (
            "class CONFIG:\n    @property\n    def size(self): return 1",
            "class CONFIG:\n    @property\n    def size(self): return 2",
        ),
        (
            "class Times:\n    def __init__(self, n): self.n, self.__wrapped__ = n, len\n"
            "    def __call__(self): return self.n\nCONFIG = Times(1)",
            "class Times:\n    def __init__(self, n): self.n, self.__wrapped__ = n, len\n"
            "    def __call__(self): return self.n\nCONFIG = Times(2)",
        ),
        ("def CONFIG(*, rate=[1]): pass", "def CONFIG(*, rate=[2]): pass"),
        ("def CONFIG(a, b): pass", "def CONFIG(a, *, b): pass"),
        (
            "def CONFIG():\n    try: go()\n    except OSError: pass",
            "def CONFIG():\n    try: go()\n    except ValueError: pass",
        ),
        (
            "from dataclasses import dataclass, field\n@dataclass\nclass CONFIG:\n"
            "    sizes: list = field(default_factory=lambda: [1])",
            "from dataclasses import dataclass, field\n@dataclass\nclass CONFIG:\n"
            "    sizes: list = field(default_factory=lambda: [2])",
        ),
        ("CONFIG = None", ""),
    ],
)
def test_a_changed_value_of_the_script_is_seen(one: str, other: str) -> None:
    prints = [
        train_in(f"{values}\ndef train(batch):\n    return CONFIG\n")
        for values in (one, one, other)
    ]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ("CONFIG = {'a': 1, 'b': [2]}", "CONFIG = {'b': [2], 'a': 1}"),
        ("CONFIG = {'a', 'b', 'c', ('d', 2)}", "CONFIG = {('d', 2), 'c', 'b', 'a'}"),
        ("def CONFIG():\n    return 1", "def CONFIG():\n    'What it does.'\n    return 1"),
        ("one = [2]\nCONFIG = [one, one]", "CONFIG = [[2], [2]]"),
        (
            "import numpy as np; CONFIG = np.arange(6).reshape(2, 3).T",
            "import numpy as np; CONFIG = np.array([[0, 3], [1, 4], [2, 5]])",
        ),
        (
            "import logging; CONFIG = logging.getLogger('__main__')",
            "import logging; CONFIG = logging.getLogger('job')",
        ),
        (
            "from functools import cache\n@cache\ndef CONFIG(x=1): return x\nCONFIG()",
            "from functools import cache\n@cache\ndef CONFIG(x=1): return x",
        ),
        (
            "import threading; CONFIG = threading.Lock()",
            "import threading; CONFIG = threading.Lock()",
        ),
    ],
)
def test_what_makes_no_difference_to_a_value_makes_none(one: str, same: str) -> None:
    prints = {train_in(f"{values}\ndef train():\n    return CONFIG\n") for values in (one, same)}
    assert len(prints) == 1


USES = (
    "from helper import scale\ndef train(x): return scale(x)",
    "import helper\ndef train(x): return helper.scale(x)",
    "import helper as h\nclass Net:\n    def go(self, x): return h.scale(x)\n"
    "def train(x): Net().go(x)",
    "import helper\ndef train(x): return getattr(helper, 'scale')(x)",
    "import package\ndef train(x): return package.helper.scale(x)",
)
HELPER = "RATE = [2]\ndef scale(x): return x * RATE[0]\ndef other(): return 1\n"


@pytest.mark.parametrize("script", USES)
@pytest.mark.parametrize("edit", [("x * R", "x + R"), ("[2]", "[3]")])
def test_another_module_of_the_user_counts(script: str, edit: tuple[str, str]) -> None:
    prints = [
        train_in(script, helper=content, package="import helper")
        for content in (HELPER, HELPER, HELPER.replace(*edit))
    ]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


@pytest.mark.parametrize("script", [use for use in USES if "getattr" not in use])
def test_what_is_not_used_of_another_module_does_not_count(script: str) -> None:
    edited = HELPER.replace("return 1", "return 2")
    prints = {train_in(script, helper=each, package="import helper") for each in (HELPER, edited)}
    assert len(prints) == 1


def test_modules_that_import_each_other_are_looked_into_once() -> None:
    script = "import job, helper\nhelper.job = job\ndef train(): return job, helper.back()"
    prints = {train_in(script, helper=f"def back(): return job, {number}") for number in (1, 2)}
    assert len(prints) == 2


def test_a_library_counts_by_its_name() -> None:
    script = "import json, os\nfrom csv import reader\ndef train(): return json.dumps, os, reader"
    assert train_in(script) == train_in(script)
    assert train_in(script) != train_in(
        script.replace("csv import reader", "csv import writer as reader")
    )


JOB = """
import numpy
import helper
from functools import lru_cache, partial

class Base:
    rates = {"a", "b", ("c", 4)}

class Net(Base):
    def size(self):
        return super().size() + len(__name__)

def tree(depth):
    return {tree, Net}, [tree(depth - 1)] if depth else helper.scale(3)

objective = partial(tree, Net())
CONFIG = {"nets": [Net()], "kinds": {int, str, Net, Base}, "array": numpy.arange(3)}

def train(config, net=Net):
    return objective(3), CONFIG, net

if __name__ == "__main__":
    from polytrain.functions.code_fingerprint import code_fingerprint
    print(code_fingerprint(train), code_fingerprint({"callbacks": [Net()]}))
"""
IMPORTED = """
import job
from polytrain.functions.code_fingerprint import code_fingerprint
print(code_fingerprint(job.train), code_fingerprint({"callbacks": [job.Net()]}))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_script_has_the_fingerprint_that_it_has_as_a_module(tmp_path: Path, seed: str) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "imported.py").write_text(IMPORTED)
    run, imported, again = (
        subprocess.run(
            [sys.executable, str(tmp_path / name)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": each},
        ).stdout
        for name, each in (("job.py", "0"), ("imported.py", seed), ("imported.py", seed))
    )
    assert run == imported == again


def test_what_is_nested_or_turns_back_is_safe() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    around: dict[str, Any] = {"x": 1}
    around["self"] = around
    other: dict[str, Any] = {"x": 2}
    other["self"] = other
    assert code_fingerprint(deep) != code_fingerprint(deep[0])
    assert code_fingerprint(around) != code_fingerprint(other)


class Odd:
    """An object of which nothing can be asked."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError


class Slotted:
    """An object without a dict."""

    __slots__ = ("rate",)

    def __init__(self, rate: Any) -> None:
        self.rate = rate


@pytest.mark.parametrize("kind", [Odd, Slotted, SimpleNamespace])
def test_an_object_counts_by_what_it_holds(kind: Any) -> None:
    def made(rate: Any) -> Any:
        return SimpleNamespace(rate=rate) if kind is SimpleNamespace else kind(rate)

    for one, other in ((1, 2), ([1], [2]), (made(1), made(2)), ({"a": {1}}, {"a": {2}})):
        assert code_fingerprint(made(one)) == code_fingerprint(made(one))
        assert code_fingerprint(made(one)) != code_fingerprint(made(other))


def test_what_pickle_cannot_store_counts_by_its_type() -> None:
    def values(number: int) -> list[Any]:
        return [threading.Lock(), (i for i in [number]), weakref.proxy(train), number]

    train = recursive
    assert code_fingerprint(values(1)) == code_fingerprint(values(1))
    assert code_fingerprint(values(1)) != code_fingerprint(values(2))
    assert code_fingerprint(threading.Lock()) != code_fingerprint(threading.local())


def test_a_library_s_object_with_a_state_that_cannot_be_stored_counts_by_its_type() -> None:
    """What comes and goes in it, such as a time, doesn't make a script another."""
    queues = queue.Queue(), queue.Queue()
    queues[1].put(3)
    assert len({code_fingerprint(each) for each in queues}) == 1


def test_of_a_large_array_a_sample_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_contents, "_WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr(object_contents, "_BLOCKS", 8)
    array = np.zeros(1 << 20, np.uint8)
    one = code_fingerprint(array)
    array[1 << 16] = 1
    assert code_fingerprint(array) == one
    array[-1] = 1
    assert code_fingerprint(array) != one


def test_another_thread_may_be_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert object_contents._of_array(object()) is None
