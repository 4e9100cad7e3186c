"""A notebook's user edits a module, and runs `fit()` again: workers have what the driver has."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.driver import run_driver

BACKEND = """
from dataclasses import dataclass, replace
from polytrain.backends.reference import Reference

@dataclass(frozen=True, kw_only=True)
class Own(Reference):
    def demand(self, job):
        return replace(super().demand(job), preload=("own_engine",))
"""

SCRIPT = """
import importlib
from pathlib import Path
from own_backend import Own
import own_rules

def train():
    polytrain.report({"parent": os.getppid(), "value": sys.modules["own_rules"].VALUE})

def fit():
    metrics = polytrain.Trainer(
        Own(), train, scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path="runs", progress=False),
    ).fit().metrics
    return metrics["parent"], metrics["value"]

before, again = fit(), fit()
print("the same process:", before == again, before[1])
Path("own_rules.py").write_text("VALUE = 'edited'")
importlib.reload(own_rules)
after = fit()
print("driver:", own_rules.VALUE, "worker:", after[1])
os.kill(after[0], signal.SIGKILL)
"""


def test_workers_have_what_was_edited_between_two_runs(tmp_path: Path) -> None:
    (tmp_path / "own_backend.py").write_text(BACKEND)
    (tmp_path / "own_engine.py").write_text("import own_rules")
    (tmp_path / "own_rules.py").write_text("VALUE = 1")
    code, output, errors = run_driver(tmp_path, SCRIPT)
    assert code == 0, errors
    assert output == "the same process: True 1\ndriver: edited worker: edited\n"
