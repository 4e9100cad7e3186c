"""Where forking isn't safe trainers are started afresh: slower, and otherwise the same."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.driver import run_driver

BACKEND = """
from dataclasses import dataclass
from polytrain.backends.reference import Reference
from polytrain_plugins import Demand

@dataclass(frozen=True, kw_only=True)
class Threaded(Reference):
    def demand(self, job):
        return Demand(preload=("starts_a_thread",), environment={"FROM_DEMAND": "set"})
"""

THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

SCRIPT = """
from threaded import Threaded
from polytrain import Trainer

def train():
    import subprocess
    context = polytrain.get_context()
    shard = polytrain.get_dataset_shard("train")
    # What was forked from the zygote has inherited its modules.
    assert "starts_a_thread" not in sys.modules
    assert os.environ["FROM_DEMAND"] == "set"
    print("rows", len(shard), "attempt", context.get_attempt())
    polytrain.report({"rows": len(shard)})
    if context.get_attempt() == 0 and context.get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

result = Trainer(
    Threaded(), train, datasets={"train": {"x": list(range(11))}},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        storage_path="runs", progress=False, failure_config=FailureConfig(max_failures=1)
    ),
).fit()
print("restarts", result.restarts)
"""


def test_a_preload_that_starts_a_thread(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(BACKEND)
    (tmp_path / "starts_a_thread.py").write_text(THREAD)
    code, output, errors = run_driver(tmp_path, SCRIPT)
    assert code == 0, errors
    assert "restarts 1" in output
    for rank, rows in ((0, 5), (1, 6)):
        assert f"(rank {rank}) rows {rows} attempt 1" in output
