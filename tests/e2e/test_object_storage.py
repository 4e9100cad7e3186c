"""Runs that are kept in object storage: by real workers, with what goes wrong there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import PREAMBLE, WITH_RAY, run_driver, start_driver
from tests.object_storage import Bucket, S3Server, s3_server
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    ValidationConfig,
    make_trainer,
)
from polytrain.checkpoint.manifest import MANIFEST_NAME


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """What s3://bucket means here, and in the drivers that are started from here."""
    server.set_environment(monkeypatch)
    yield server.make_bucket("bucket")
    server.reset()


def stored(bucket: Bucket) -> dict[str, bytes]:
    """All objects with their content."""
    pages = bucket.client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name)
    keys = [found["Key"] for page in pages for found in page.get("Contents", [])]
    return {
        key: bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read() for key in keys
    }


def test_a_run_goes_on_after_a_kill_and_at_another_size(bucket: Bucket, tmp_path: Path) -> None:
    code, printed, errors = run_driver(
        tmp_path,
        """
        import json
        from polytrain import TrainingFailedError
        from polytrain.testing import Fault
        from polytrain.testing.contract import kit_table
        from polytrain.testing.functions import count_steps

        def fit(workers, at_step, max_failures):
            result = make_trainer(
                "reference", count_steps,
                train_loop_config={"fault": Fault(rank=0, at_step=at_step)},
                datasets={"train": kit_table()},
                scaling_config=ScalingConfig(num_workers=workers),
                run_config=RunConfig(
                    name="one", storage_path="s3://bucket/runs", progress=False,
                    failure_config=FailureConfig(max_failures=max_failures),
                ),
            ).fit()
            print(json.dumps([list(result.history), result.restarts, result.checkpoint.path]))

        try:
            fit(2, 2, 0)
        except TrainingFailedError as error:
            print(json.dumps([error.result.metrics, str(error)]))
        # Each driver's attempts count from 0: this one is killed too.
        fit(3, 3, 1)
        """,
    )
    assert code == 0, errors
    failed, ended = [json.loads(line) for line in printed.splitlines()]
    metrics, why = failed
    assert metrics["step"] == 2
    assert "SIGKILL" in why
    history, restarts, checkpoint = ended
    assert [metrics["step"] for metrics in history] == [1, 2, 3, 4]
    assert [metrics["resumed_from"] for metrics in history] == [0, 0, 2, 3]
    assert restarts == 2
    assert checkpoint.startswith("s3://bucket/runs/one/checkpoints/checkpoint_000003-")

    [result] = json.loads(read_elsewhere("s3://bucket/runs/one"))
    assert result == [history, restarts, checkpoint, {"step-0": "4"}]


def commits_on_and_on(config: dict[str, Any]) -> None:
    """Makes checkpoints of several files."""
    done = config["done"]
    for step in range(done + 1, done + config["steps"] + 1):
        with tempfile.TemporaryDirectory() as directory:
            for name in "abc":
                Path(directory, name).write_text(str(step))
            polytrain.report(
                {"step": step}, checkpoint=Checkpoint.from_directory(directory), upload="sync"
            )
        if step == config["fails_at"]:
            raise ArithmeticError("on purpose")


def test_a_commit_after_a_resume_makes_as_many_requests_as_one_before(bucket: Bucket) -> None:
    """However many checkpoints are kept."""

    def fit(done: int, fails_at: int | None = None) -> list[int]:
        """The requests about checkpoints from each commit to the next."""
        bucket.server.requests.clear()
        trainer = make_trainer(
            "reference",
            commits_on_and_on,
            train_loop_config={"done": done, "steps": 4, "fails_at": fails_at},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="kept", storage_path="s3://bucket/runs", progress=False),
        )
        if fails_at is None:
            trainer.fit()
        else:
            with pytest.raises(TrainingFailedError, match="on purpose"):
                trainer.fit()
        of_checkpoints = [each for each in bucket.server.requests if "kept/checkpoints" in each]
        commits = [
            at
            for at, each in enumerate(of_checkpoints)
            if each.startswith("PUT") and MANIFEST_NAME in each
        ]
        assert len(commits) == 4
        return [after - before for before, after in pairwise(commits)]

    first, resumed = fit(0, fails_at=4), fit(4)
    assert max(resumed) <= max(first), f"{resumed}, not {first}"


def read_elsewhere(address: str) -> str:
    """What a process that has no Ray finds of a run."""
    script = """
import json, sys
from pathlib import Path
from polytrain import Result

result = Result.from_path(sys.argv[1])
with result.checkpoint.as_directory() as directory:
    files = {path.name: path.read_text() for path in Path(directory).iterdir()}
assert "ray" not in sys.modules
print(json.dumps([[list(result.history), result.restarts, result.checkpoint.path, files]]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, address], check=True, stdout=subprocess.PIPE, text=True
    )
    return ended.stdout


TRAINING = """
    def train(config):
        import tempfile
        from pathlib import Path
        from polytrain import Checkpoint

        for step in range(1, 5):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "step").write_text(str(step))
                checkpoint = Checkpoint.from_directory(directory)
                rank = polytrain.get_context().get_world_rank()
                polytrain.report(
                    {"step": step}, checkpoint=checkpoint if rank == 0 else None, upload="sync"
                )
            if step == 2 and rank == 0:
                print("two steps are safe", flush=True)
                # Blocks until somebody writes to it.
                Path(config["pipe"]).read_text()

    def trainer(**storage):
        return make_trainer(
            "reference", train,
            train_loop_config={"pipe": os.path.abspath("pipe")},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="one", progress=False, **storage),
        )
"""


def test_a_storage_that_is_out_for_a_while_is_waited_for(bucket: Bucket, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    driver = start_driver(
        tmp_path,
        TRAINING
        + """
    result = trainer(storage_path="s3://bucket/runs").fit()
    print([metrics["step"] for metrics in result.history], result.restarts)
    """,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "(rank 0) two steps are safe\n"
    with bucket.server.out_of_order() as outage:
        pipe.write_text("go on")
        # More than the client makes of one call by itself.
        outage.wait_for_requests(10, about="/checkpoints/checkpoint_000002-")
    found, errors = driver.communicate(timeout=120)
    assert found == "[1, 2, 3, 4] 0\n", errors
    result = Result.from_path("s3://bucket/runs/one")
    assert len(result.best_checkpoints) == 4
    for checkpoint, metrics in result.best_checkpoints:
        checkpoint.verify()
        with checkpoint.as_directory() as directory:
            assert Path(directory, "step").read_text() == str(metrics["step"])


@pytest.mark.sweep
@pytest.mark.parametrize("is_on_ray", [False, only_in_sweep(True)])
def test_nobody_sees_the_credentials(bucket: Bucket, tmp_path: Path, is_on_ray: bool) -> None:
    """Neither of a run that is given them, and fails from its storage, nor in what it leaves."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    driver = start_driver(
        tmp_path,
        TRAINING
        + """
    import pyarrow.fs
    from polytrain import TrainingFailedError

    filesystem = pyarrow.fs.S3FileSystem(
        access_key=os.environ.pop("AWS_ACCESS_KEY_ID"),
        secret_key=os.environ.pop("AWS_SECRET_ACCESS_KEY"),
        endpoint_override=os.environ.pop("AWS_ENDPOINT_URL"),
        region="us-east-1",
    )
    if "ray" in sys.modules:
        print(ray._private.worker._global_node.get_logs_dir_path(), flush=True)
    config = dict(
        storage_path="bucket/runs", storage_filesystem=filesystem, storage_timeout_s=0.5
    )
    print(trainer(**config)._spec)
    try:
        trainer(**config).fit()
    except TrainingFailedError as error:
        print(repr(error), error, error.result, error.failures)
    """,
        preamble=WITH_RAY if is_on_ray else PREAMBLE,
    )
    assert driver.stdout is not None
    left_in = [tmp_path, *([Path(driver.stdout.readline().strip())] if is_on_ray else [])]
    shown = driver.stdout.readline()
    assert "RunConfig" in shown
    assert driver.stdout.readline() == "(rank 0) two steps are safe\n"
    with bucket.server.out_of_order():
        pipe.write_text("go on")
        found, errors = driver.communicate(timeout=120)
    assert "TrainingFailedError" in found
    assert "(HTTP status 503)" in found

    secret = bucket.server.environment["AWS_SECRET_ACCESS_KEY"].encode()
    files = [path for each in left_in for path in each.rglob("*") if path.is_file()]
    left = [path.read_bytes() for path in files]
    assert len(left) > (5 if is_on_ray else 0)
    everything = [shown.encode(), found.encode(), errors.encode(), *left, *stored(bucket).values()]
    assert not any(secret in text for text in everything)

    result = Result.from_path("s3://bucket/runs/one")
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2, 1]
    for checkpoint, _ in result.best_checkpoints:
        checkpoint.verify()


def report_twice() -> None:
    for step in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            checkpoint = Checkpoint.from_directory(directory)
            polytrain.report({"step": step}, checkpoint=checkpoint, validation=True)


def validate(checkpoint: Checkpoint) -> dict[str, Any]:
    with checkpoint.as_directory() as directory:
        step = int(Path(directory, "step").read_text())
    return {"validated": step, "read_from": checkpoint.path}


def test_a_checkpoint_in_a_bucket_is_validated(bucket: Bucket) -> None:
    """Its process reads from the bucket by itself."""
    result = make_trainer(
        "reference",
        report_twice,
        run_config=RunConfig(name="one", storage_path="s3://bucket/runs", progress=False),
        validation_config=ValidationConfig(fn=validate),
    ).fit()
    assert [metrics["validated"] for metrics in result.history] == [1, 2]
    assert result.metrics["read_from"].startswith("s3://bucket/runs/one/checkpoints/")
    assert list(Result.from_path("s3://bucket/runs/one").history) == list(result.history)
