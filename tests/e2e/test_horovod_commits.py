"""A commit of `hvd.elastic` that has returned on any rank is never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import FailureConfig, Result, RunConfig, TrainingFailedError

LIBRARIES = ("polytrain_torch.horovod",)


def train(config: dict[str, Any]) -> None:
    """Each step is committed. A rank dies within a commit, once another one's has returned.

    It waits for that a second at most.
    """
    import os
    import signal
    import time

    import torch

    import polytrain_torch.checkpoints.training_state as saving
    import polytrain_torch.horovod as hvd
    from polytrain import get_context

    hvd.init()
    context = get_context()
    log = Path(f"{config['log']}-{context.get_attempt()}")

    def note(event: str) -> None:
        with log.open("a") as file:
            file.write(f"{event} {state.step}\n")

    if hvd.rank() == config["rank"] and context.get_attempt() == 0:
        owner: Any = saving if hasattr(saving, config["dies_after"]) else saving.TrainingState
        own = getattr(owner, config["dies_after"])

        def dying(*arguments: Any, **options: Any) -> Any:
            result = own(*arguments, **options)
            until = time.monotonic() + 1
            while state.step == 4 and time.monotonic() < until:
                if "committed 4" in log.read_text():
                    break
                time.sleep(0.001)
            if state.step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, config["dies_after"], dying)

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

    @hvd.elastic.run
    def steps(state: Any) -> None:
        note("begins")
        while state.step < 8:
            optimizer.zero_grad()
            net(torch.full((4, 2), state.step + hvd.rank() + 0.5)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            note("committed")

    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0)
    steps(state)


def fit(
    quiet: RunConfig, rank: int | None, dies_after: str = "", *, log: str = "log", **changes: Any
) -> Result:
    config = {"rank": rank, "dies_after": dies_after, "log": f"{quiet.storage_path}/{log}"}
    return torch_runs.fit(quiet, train, config, libraries=LIBRARIES, **changes)


def noted(quiet: RunConfig, event: str, log: str) -> set[int]:
    lines = Path(str(quiet.storage_path), log).read_text().splitlines()
    return {int(step) for each, step in map(str.split, lines) if each == event}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(RunConfig(storage_path=tmp_path_factory.mktemp("calm"), progress=False), None)


WITHIN_A_COMMIT = [(0, "write_state"), only_in_sweep(1, "report")]
"""A rank, and what it dies after: rank 0 writes the files, and all ranks report afterwards."""


@pytest.mark.sweep
@pytest.mark.parametrize(("rank", "dies_after"), WITHIN_A_COMMIT)
def test_a_commit_that_has_returned_is_there(
    quiet: RunConfig, undisturbed: Result, rank: int, dies_after: str
) -> None:
    result = fit(quiet, rank, dies_after)
    assert result.restarts == 1
    [begun] = noted(quiet, "begins", "log-1")
    assert begun >= max(noted(quiet, "committed", "log-0"))
    assert equal(result.load_model(), undisturbed.load_model())


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(1), 3])
def test_other_workers_begin_with_it_too(quiet: RunConfig, workers: int) -> None:
    with pytest.raises(TrainingFailedError):
        fit(quiet, 0, "write_state", name="run", failure_config=FailureConfig(max_failures=0))
    fit(quiet, None, name="run", workers=workers, log="again")
    [begun] = noted(quiet, "begins", "again-0")
    assert begun >= max(noted(quiet, "committed", "log-0"))
