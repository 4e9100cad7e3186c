"""Trainers that die, or fail, whenever they are started: the run ends soon, and says why."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import PREAMBLE
from tests.e2e.journals import journal

from polytrain import (
    DataConfig,
    FailureConfig,
    FailureKind,
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    make_trainer,
)
from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain.workers.driver.group import Handler
from polytrain.workers.driver.inline_group import InlineGroup
from polytrain_plugins import World
from polytrain_torch.backend import Torch
from polytrain_torch.engine import TorchEngine

AGAIN = "not retried, because the attempt before had the same error at step 0: it would come again"
IN_A_ROW = "5 attempts in a row have ended before they trained"


def failed(trainer: Trainer) -> tuple[TrainingFailedError, list[dict[str, Any]]]:
    """How a run fails, and what its journal has of the attempts."""
    with pytest.raises(TrainingFailedError) as caught:
        trainer.fit()
    assert caught.value.result is not None
    return caught.value, journal(caught.value.result.path, "AttemptEnded")


def for_ever(quiet: RunConfig) -> RunConfig:
    return dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=-1))


def crash() -> None:
    import ctypes

    print("the last words", file=sys.stderr, flush=True)
    ctypes.string_at(0)


def run_into(what: object) -> None:
    raise AssertionError("nobody comes this far")


@pytest.fixture
def exiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """An object whose module ends every process but this one that imports it."""
    (tmp_path / "exiting.py").write_text(
        "import os, sys\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    print('the last words', file=sys.stderr, flush=True)\n"
        "    os._exit(3)\n"
        "class Thing:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("exiting")
    monkeypatch.delitem(sys.modules, "exiting")
    monkeypatch.setitem(sys.modules, "exiting", module)
    thing: object = module.Thing()
    return thing


def assert_died_at_each_start(trainer: Trainer, message: str) -> None:
    error, attempts = failed(trainer)
    assert error.reason == AGAIN
    assert message in str(error)
    assert str(error).count("the last words") == 1
    assert len(attempts) == 2
    for attempt in attempts:
        assert attempt["failure"]["kind"] == "WORKER_LOST"
        assert "the last words" in attempt["failure"]["output"]


def test_a_crash_in_the_first_line_ends_the_run_with_its_last_words(quiet: RunConfig) -> None:
    trainer = make_trainer(
        "reference",
        crash,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=for_ever(quiet),
    )
    assert_died_at_each_start(trainer, "killed by SIGSEGV before its training was done")


def test_an_import_that_ends_the_process_ends_the_run_with_its_last_words(
    quiet: RunConfig, exiting: object
) -> None:
    trainer = make_trainer(
        "reference",
        run_into,
        train_loop_config={"what": exiting},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=for_ever(quiet),
    )
    assert_died_at_each_start(trainer, "exited with code 3 before it had joined the others")


class NeverMeets(Reference):
    """A backend whose ranks can't be brought together."""

    def engine(self) -> ReferenceEngine:
        return _NeverMeets(self)


class _NeverMeets(ReferenceEngine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        raise RuntimeError(f"no way from rank {world.me.rank}")
        yield


def test_an_engine_that_never_joins_is_a_start_failure(quiet: RunConfig) -> None:
    trainer = Trainer(
        NeverMeets(),
        run_into,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=for_ever(quiet),
    )
    error, attempts = failed(trainer)
    assert "the 2 attempts before had the same error at steps 0 and 0" in error.reason
    assert "before it had joined the others: RuntimeError: no way from rank" in str(error)
    assert "in joined" in str(error)
    assert [attempt["failure"]["kind"] for attempt in attempts] == ["STARTUP"] * 3


class FailsOnceJoined(Torch):
    """A backend whose rank 0 fails when it has joined the others, who are in a collective."""

    def engine(self) -> TorchEngine:
        return _FailsOnceJoined(self)


class _FailsOnceJoined(TorchEngine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        try:
            with super().joined(world):
                yield
        finally:
            if world.me.rank == 0:
                # The other rank comes first to say that it has lost this one.
                signal.pause()

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        if world.me.rank == 0:
            raise RuntimeError("no memory for the sums")
        return super().sum_over_ranks(values, world)


def test_a_rank_that_fails_once_it_has_joined_is_named_and_not_those_that_lose_it(
    quiet: RunConfig,
) -> None:
    trainer = Trainer(
        FailsOnceJoined(),
        run_into,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=quiet,
    )
    error, _ = failed(trainer)
    assert (error.failures[0].kind, error.failures[0].rank) == (FailureKind.STARTUP, 0)
    assert "no memory for the sums" in str(error)


def test_data_that_can_not_be_read_any_more_is_named(
    quiet: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polytrain.policy.failure._PAUSE_S", 0.001)
    file = tmp_path / "rows.csv"
    file.write_text("x,y\n" + "1,2\n" * 100)
    trainer = make_trainer(
        "reference",
        label="y",
        datasets={"train": str(file)},
        dataset_config={"train": DataConfig(shuffle=True)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=for_ever(quiet),
    )
    file.unlink()
    error, attempts = failed(trainer)
    assert error.reason == IN_A_ROW
    assert error.failures[0].kind is FailureKind.STARTUP
    assert "its data can't be read" in str(error)
    assert str(file) in str(error)
    assert len(attempts) == 5


def test_a_run_in_this_process_waits_between_starts_that_fail(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    wait = InlineGroup.wait

    def counted(group: InlineGroup, handle: Handler, timeout: float | None) -> None:
        waits.append(timeout)
        wait(group, handle, timeout)

    monkeypatch.setattr(InlineGroup, "wait", counted)
    monkeypatch.setattr("polytrain.policy.failure._PAUSE_S", 0.05)
    failures = FailureConfig(max_failures=-1, retry_user_errors=True)
    trainer = make_trainer(
        "reference",
        raise_at_once,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=dataclasses.replace(quiet, failure_config=failures),
    )
    error, attempts = failed(trainer)
    assert (error.reason, len(attempts)) == (IN_A_ROW, 5)
    assert len(waits) < 50, "it looks again and again"


def raise_at_once() -> None:
    raise OSError("no answer")


def test_memory_that_does_not_suffice_is_reported_as_that(quiet: RunConfig) -> None:
    trainer = make_trainer(
        "reference",
        ask_for_too_much,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=for_ever(quiet),
    )
    error, attempts = failed(trainer)
    # Once more it is tried, then it is clear that it comes again.
    assert [attempt["failure"]["kind"] for attempt in attempts] == ["OUT_OF_MEMORY"] * 2
    assert error.failures[0].kind is FailureKind.OUT_OF_MEMORY
    assert error.failures[0].rank == 1
    assert isinstance(error.__cause__, MemoryError)
    assert "ask_for_too_much" in str(error)


def ask_for_too_much() -> None:
    import signal

    import polytrain

    if polytrain.get_context().get_world_rank() == 0:
        signal.pause()
    bytearray(1 << 62)


RUNTIME_ENVIRONMENT = """
ray.init(
    address="local", num_cpus=2, log_to_driver=False, logging_level=40,
    runtime_env={"conda": "there-is-no-such-environment"},
)
try:
    make_trainer(
        "reference", lambda: None, scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path="runs", progress=False),
    ).fit()
except polytrain.TrainingFailedError as error:
    print("REPORTED", str(error).replace("\\n", " "))
ray.shutdown()
"""


# It starts a Ray of its own. That of a run which can't be set up is tested each time.
@pytest.mark.sweep
@pytest.mark.only_in_sweep
def test_why_a_jobs_runtime_environment_can_not_be_set_up_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(PREAMBLE + "import ray\n" + RUNTIME_ENVIRONMENT)
    run = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    [printed] = [line for line in run.stdout.splitlines() if line.startswith("REPORTED")]
    assert "the runtime_env of the Ray job can't be set up" in printed
    # In the words of whoever tried, beyond Ray's own first line.
    assert "conda" in printed.partition("can't be set up")[2]


def test_ray_client_is_refused_with_the_way_that_works(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(InvalidJobError, match=r"ray://head:10001 .*\bray job submit --address"):
        make_trainer("reference", lambda: None, run_config=quiet).fit()
