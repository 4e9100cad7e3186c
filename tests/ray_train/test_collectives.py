"""`polytrain.collective`: barriers and broadcasts, in every framework and without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polytrain as train

TWO = train.ScalingConfig(num_workers=2)


def fit(
    function: Callable[[], Any],
    path: Path,
    *,
    config: Any = None,
    scaling: train.ScalingConfig = TWO,
    **failure: Any,
) -> train.Result:
    return train.DataParallelTrainer(
        function,
        backend_config=config,
        scaling_config=scaling,
        run_config=train.RunConfig(
            storage_path=path, progress=False, failure_config=train.FailureConfig(**failure)
        ),
    ).fit()


def shares() -> tuple[Any, bool]:
    """As in Ray Train's guide: rank 0 makes something that all ranks use."""
    from polytrain.collective import broadcast_from_rank_zero

    rank = train.get_context().get_world_rank()
    mine = {"name": "run", "sizes": (1, 2)} if rank == 0 else None
    received = broadcast_from_rank_zero(mine)
    train.collective.barrier()
    return received, received is mine


@pytest.mark.parametrize("config", [None, train.torch.TorchConfig()], ids=["plain", "torch"])
def test_rank_0_shares_what_it_has(tmp_path: Path, config: Any) -> None:
    (first, is_own), (second, is_copy) = fit(shares, tmp_path, config=config).return_values
    assert first == second == {"name": "run", "sizes": (1, 2)}
    assert (is_own, is_copy) == (True, False)


def test_one_worker_shares_with_itself(tmp_path: Path) -> None:
    result = fit(shares, tmp_path, scaling=train.ScalingConfig(num_workers=0))
    assert result.return_value == ({"name": "run", "sizes": (1, 2)}, True)


def writes_before_the_barrier(config: dict[str, Any]) -> bool:
    mark = Path(config["mark"])
    if train.get_context().get_world_rank() == 0:
        # The other rank is there long before.
        sum(range(3_000_000))
        mark.touch()
    train.collective.barrier()
    return mark.exists()


def test_no_rank_passes_a_barrier_before_all_are_there(tmp_path: Path) -> None:
    result = train.DataParallelTrainer(
        writes_before_the_barrier,
        train_loop_config={"mark": str(tmp_path / "mark")},
        scaling_config=TWO,
        run_config=train.RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    assert result.return_values == (True, True)


def calls_different_ones() -> None:
    if train.get_context().get_world_rank() == 0:
        train.collective.barrier()
    else:
        train.collective.broadcast_from_rank_zero(1)


@pytest.mark.parametrize("config", [None, train.torch.TorchConfig()], ids=["plain", "torch"])
def test_ranks_that_make_different_calls_are_named(tmp_path: Path, config: Any) -> None:
    with pytest.raises(train.TrainingFailedError) as caught:
        fit(calls_different_ones, tmp_path, config=config)
    line = calls_different_ones.__code__.co_firstlineno
    text = str(caught.value)
    assert f"barrier() (test_collectives.py, line {line + 2})" in text
    assert f"broadcast_from_rank_zero() (test_collectives.py, line {line + 4})" in text
    assert "all ranks must make the same calls" in text


def only_rank_0_waits() -> None:
    if train.get_context().get_world_rank() == 0:
        train.collective.barrier()


def test_a_rank_that_has_ended_is_named_by_torch_at_once(tmp_path: Path) -> None:
    with pytest.raises(train.TrainingFailedError) as caught:
        fit(only_rank_0_waits, tmp_path, config=train.torch.TorchConfig())
    assert "rank 0 is in polytrain.collective.barrier()" in str(caught.value)
    assert "rank 1 has ended its training function" in str(caught.value)


def test_a_barrier_that_hangs_is_ended_with_both_sides_named(tmp_path: Path) -> None:
    with pytest.raises(train.TrainingFailedError) as caught:
        fit(only_rank_0_waits, tmp_path, hang_timeout_s=1.5)
    failure = caught.value.failures[0]
    assert failure.kind is train.FailureKind.HANG
    assert "rank 1" in str(failure)
    assert "only_rank_0_waits" in failure.stacks[0]


def broadcasts_a_lock() -> None:
    import threading

    train.collective.broadcast_from_rank_zero(threading.Lock())


def test_what_can_not_be_pickled_is_named(tmp_path: Path) -> None:
    with pytest.raises(train.TrainingFailedError, match=r"cannot pickle '_thread.lock'"):
        fit(broadcasts_a_lock, tmp_path)


def test_outside_a_training_function_there_are_no_ranks() -> None:
    for call in (train.collective.barrier, lambda: train.collective.broadcast_from_rank_zero(1)):
        with pytest.raises(train.NotInWorkerError, match="only inside a training function"):
            call()
