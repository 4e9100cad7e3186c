"""A program that trains again and again, as a sweep or a service does, holds no more each time."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.driver import run_driver

SCRIPT = """
import gc, tempfile, threading
from pathlib import Path
import psutil
from polytrain import Checkpoint, TrainingFailedError, ValidationConfig

Path("rows.csv").write_text("a\\n" + "1\\n" * 8)
temporary = Path("temporary").absolute()
temporary.mkdir()
os.environ["TMPDIR"] = str(temporary)

def train(config):
    how = config["how"]
    for _ in polytrain.get_dataset_shard("train").iter_batches(batch_size=4):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "model").write_text("model")
            polytrain.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(directory))
        if how == "raises":
            raise ValueError("the loss is not finite")
        if how == "is killed" and polytrain.get_context().get_attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def validate(checkpoint):
    return {"accuracy": 1.0}

def run(workers, how, wait=True):
    trainer = make_trainer(
        "reference",
        train,
        train_loop_config={"how": how},
        datasets={"train": "rows.csv"},
        scaling_config=ScalingConfig(num_workers=workers, cluster="local"),
        run_config=RunConfig(
            storage_path="runs",
            progress=False,
            track="csv",
            failure_config=FailureConfig(max_failures=1),
        ),
        validation_config=ValidationConfig(fn=validate) if workers else None,
    )
    try:
        if wait:
            trainer.fit()
        else:
            trainer.fit(wait=False).result()
    except TrainingFailedError:
        assert how == "raises"

def all_kinds():
    for workers in (0, 1, 2):
        run(workers, "ends well")
        run(workers, "raises")
    run(2, "is killed")
    for workers in (0, 1):
        run(workers, "ends well", wait=False)

def is_ending(thread):
    if isinstance(thread, threading.Timer):
        # It would have ended a zygote that another run has taken.
        return thread.finished.is_set()
    return thread.name.startswith(("polytrain reference", "polytrain-call"))

def held():
    for thread in filter(is_ending, threading.enumerate()):
        thread.join()
    gc.collect()
    ours = [each for each in gc.get_objects() if str(type(each)).startswith("<class 'polytrain")]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(psutil.Process().children(recursive=True)),
        "objects": len(ours),
        "temporary files": [str(path) for path in temporary.rglob("*")],
    }

if __name__ == "__main__":
    all_kinds()
    before = held()
    all_kinds()
    after = held()
    print(before == after, before, after)
"""


def test_descriptors_processes_and_memory_do_not_grow_with_runs(tmp_path: Path) -> None:
    code, output, errors = run_driver(tmp_path, SCRIPT, seconds=240)
    assert code == 0, errors
    assert output.startswith("True"), output
