"""Horovod's interface on three workers: every call against plain torch in one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tests.e2e import horovod_cases as cases

from polytrain import (
    FailureConfig,
    NotInWorkerError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

RANKS = 3

# Workers don't find this folder.
cloudpickle.register_pickle_by_value(cases)


def fit(
    storage: Path, function: Any, workers: int = RANKS, config: Any = None, **run: Any
) -> Result:
    failures = FailureConfig(max_failures=run.pop("max_failures", 0))
    return make_trainer(
        "torch",
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=storage, progress=False, failure_config=failures, **run),
    ).fit()


def all_cases(config: dict[str, Any]) -> None:
    """Run every call, and write what it returned."""
    import polytrain_torch.horovod as hvd

    hvd.init()
    returned = {name: cases.plain(call(hvd)) for name, (call, _) in cases.CALLS.items()}
    returned |= {f"training {name}": call(hvd) for name, (call, _) in cases.TRAININGS.items()}
    returned["joined"] = cases.joined(hvd)
    Path(config["directory"], f"{hvd.rank()}.json").write_text(json.dumps(returned))


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("returned")
    fit(tmp_path_factory.mktemp("runs"), all_cases, config={"directory": str(directory)})
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", cases.CALLS)
def test_call(returned: list[dict[str, Any]], name: str) -> None:
    _, expected = cases.CALLS[name]
    for rank in range(RANKS):
        assert returned[rank][name] == cases.plain(expected(rank, RANKS)), rank


@pytest.mark.parametrize("name", cases.TRAININGS)
def test_training(returned: list[dict[str, Any]], name: str) -> None:
    _, expected = cases.TRAININGS[name]
    for rank in range(RANKS):
        weights = returned[rank][f"training {name}"]
        assert weights == pytest.approx(expected(RANKS), abs=1e-6), rank


def test_join_with_uneven_data(returned: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        last, weights = returned[rank]["joined"]
        assert last == RANKS - 1
        assert weights == pytest.approx(cases.joined_alone(RANKS), abs=1e-6)


def more_cases(config: dict[str, Any]) -> None:
    """What Horovod leaves open, or does only elsewhere."""
    import polytrain_torch.horovod as hvd

    hvd.init()
    # A graph that differs between the ranks: parts of the model that a rank doesn't use.
    torch.manual_seed(0)
    parts = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(hvd.size()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parts.parameters(), lr=1.0))
    before = [each.weight.detach().clone() for each in parts]
    parts[hvd.rank()](torch.ones(2)).sum().backward()
    hvd.allreduce(torch.ones(1))
    optimizer.step()
    moved = [(old - each.weight.detach()).tolist() for old, each in zip(before, parts, strict=True)]

    # What a script does to gradients that are on their way would be lost.
    torch.stack([part(torch.ones(2)) for part in parts]).sum().backward()
    torch.nn.utils.clip_grad_norm_(parts.parameters(), 0.1)
    refused = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        refused = str(error)

    # Sparse gradients stay sparse for the step.
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(embedding.weight)
    sparse = hvd.DistributedOptimizer(torch.optim.SparseAdam(embedding.parameters(), lr=1.0))
    embedding(torch.tensor([hvd.rank()])).sum().backward()
    sparse.step()

    # Batch norm over the rows of all ranks, which are of different numbers.
    norm = hvd.SyncBatchNorm(2)
    rows = torch.arange(2.0 * RANKS * (RANKS + 1) // 2 * 2).reshape(-1, 2) ** 1.5
    begin = hvd.rank() * (hvd.rank() + 1)
    mine = rows[begin : begin + 2 * (hvd.rank() + 1)].clone().requires_grad_()
    out = norm(mine)
    (out * mine.detach()).sum().backward()
    assert mine.grad is not None
    Path(config["directory"], f"{hvd.rank()}.json").write_text(
        json.dumps(
            {
                "moved": moved,
                "refused": refused,
                "embedding": embedding.weight.tolist(),
                "normalized": out.tolist(),
                "gradient": mine.grad.tolist(),
                "running": [norm.running_mean.tolist(), norm.running_var.tolist()],
                "half": cases.trained(hvd, {"compression": hvd.Compression.fp16}),
            }
        )
    )


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("more")
    fit(tmp_path_factory.mktemp("runs"), more_cases, config={"directory": str(directory)})
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_parts_without_a_gradient_count_as_zero(more: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        assert torch.tensor(more[rank]["moved"]).flatten().tolist() == pytest.approx(
            [1 / RANKS] * 2 * RANKS
        )


def test_gradients_that_are_changed_too_early_are_refused(more: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        assert "Call optimizer.synchronize() before" in more[rank]["refused"]


def test_sparse_gradients(more: list[dict[str, Any]]) -> None:
    """Adam's first step is the learning rate, in rows that a rank has used."""
    for rank in range(RANKS):
        [*used, unused] = more[rank]["embedding"]
        assert torch.tensor(used).flatten().tolist() == pytest.approx([-1.0] * 2 * RANKS)
        assert unused == [0.0, 0.0]


def test_batch_norm_over_all_rows(more: list[dict[str, Any]]) -> None:
    rows = torch.arange(2.0 * RANKS * (RANKS + 1) // 2 * 2).reshape(-1, 2) ** 1.5
    rows.requires_grad_()
    norm = torch.nn.BatchNorm1d(2)
    out = norm(rows)
    (out * rows.detach()).sum().backward()
    assert rows.grad is not None
    for name, expected in (("normalized", out), ("gradient", rows.grad)):
        gathered = torch.cat([torch.tensor(more[rank][name]) for rank in range(RANKS)])
        torch.testing.assert_close(gathered, expected.detach(), rtol=1e-4, atol=1e-4)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    for rank in range(RANKS):
        mean, variance = more[rank]["running"]
        assert mean == pytest.approx(norm.running_mean.tolist())
        assert variance == pytest.approx(norm.running_var.tolist())


def test_half_precision(more: list[dict[str, Any]]) -> None:
    expected = cases.trained_alone(RANKS)
    for rank in range(RANKS):
        assert more[rank]["half"] == pytest.approx(expected, abs=2e-3)
        assert more[rank]["half"] != pytest.approx(expected, abs=1e-9)


def different_calls() -> None:
    import polytrain_torch.horovod as hvd

    hvd.init()
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(2), name="loss")
    else:
        hvd.broadcast(torch.ones(2), root_rank=0)


def different_shapes() -> None:
    import polytrain_torch.horovod as hvd

    hvd.init()
    hvd.allreduce(torch.ones(2 + hvd.rank()))


def broadcast_after_join() -> None:
    import polytrain_torch.horovod as hvd

    hvd.init()
    if hvd.rank() == 0:
        hvd.join()
    hvd.broadcast(torch.ones(2), root_rank=0)
    hvd.join()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (different_calls, r"hvd\.(broadcast|allreduce).*hvd\.(allreduce|broadcast).*same order"),
        (different_shapes, r"\[[23]\].*\[[32]\].*same order"),
        (broadcast_after_join, "calls hvd.broadcast, and rank 0 has joined"),
    ],
)
def test_ranks_that_make_different_calls(tmp_path: Path, function: Any, words: str) -> None:
    """Horovod would wait for ever."""
    with pytest.raises(TrainingFailedError) as caught:
        fit(tmp_path, function, workers=2)
    assert re.search(words, str(caught.value))


def elastic(config: dict[str, Any]) -> None:
    """The elastic example of Horovod's documentation; rank 1 may be killed at a step."""
    import os
    import signal

    import polytrain_torch.horovod as hvd
    from polytrain import get_context

    hvd.init()
    torch.manual_seed(hvd.rank())
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(24), seed=5)
    loader = torch.utils.data.DataLoader(
        [float(number) for number in range(24)], batch_size=2, sampler=sampler
    )
    begun: list[str] = []

    def on_reset() -> None:
        begun.append(f"reset at {state.epoch}")

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 3:
            for number, items in enumerate(loader):
                with Path(config["log"], f"{hvd.rank()}").open("a") as file:
                    file.write(f"{state.epoch} {[int(item) for item in items]}\n")
                optimizer.zero_grad()
                (net(items.float()[:, None]) ** 2).mean().backward()
                optimizer.step()
                sampler.record_batch(number, len(items))
                if number == 2:
                    state.commit()
                step = 6 * state.epoch + number + 1
                dies = hvd.rank() == 1 and get_context().get_attempt() == 0
                if dies and step == config["dies_at"]:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
        state.begun = begun
        state.commit()

    state = hvd.elastic.TorchState(
        model=net, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, begun=[]
    )
    state.register_reset_callbacks([on_reset])
    train(state)


@pytest.fixture(scope="module")
def elastic_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    runs = {}
    for kills in (False, True):
        log = tmp_path_factory.mktemp("log")
        result = fit(
            tmp_path_factory.mktemp("runs"),
            elastic,
            workers=2,
            config={"log": str(log), "dies_at": 10 if kills else -1},
            max_failures=1,
        )
        runs[kills] = result, [(log / str(rank)).read_text().splitlines() for rank in range(2)]
    return runs


def test_a_kill_resumes_from_the_last_commit(elastic_runs: dict[bool, Any]) -> None:
    (calm, _), (killed, _) = elastic_runs[False], elastic_runs[True]
    assert calm.restarts == 0
    assert killed.restarts == 1
    assert calm.metrics == {"epoch": 3, "batch": 0}
    assert killed.metrics == calm.metrics
    for name, tensor in calm.load_model().items():
        assert torch.equal(tensor, killed.load_model()[name])


def test_only_what_came_after_the_commit_is_read_again(elastic_runs: dict[bool, Any]) -> None:
    """Rank 1 dies one batch after the commit; rank 0 may have begun the batch after that."""
    for rank in range(2):
        calm, killed = elastic_runs[False][1][rank], elastic_runs[True][1][rank]
        assert len(calm) == 3 * 6
        again = list(killed)
        for line in calm:
            again.remove(line)
        assert {line.split()[0] for line in again} == {"1"}
        assert len(again) <= (2 if rank == 0 else 1)


def test_outside_of_a_worker() -> None:
    import polytrain_torch.horovod as hvd

    with pytest.raises(NotInWorkerError, match="make_trainer"):
        hvd.init()
    with pytest.raises(ValueError, match="use hvd"):
        hvd.rank()


def test_result_of_a_run_with_one_worker(tmp_path: Path) -> None:
    """`num_workers=0`, where there are no others."""
    import polytrain
    import polytrain_torch.horovod as hvd

    def train() -> None:
        hvd.init()
        tensor = torch.arange(3.0)
        assert hvd.size() == 1
        assert torch.equal(hvd.allreduce(tensor), tensor)
        assert torch.equal(hvd.allgather(tensor), tensor)
        assert hvd.join() == 0
        polytrain.report({"loss": cases.trained(hvd, {}) == cases.trained_alone(1)})
        hvd.shutdown()
        assert not hvd.is_initialized()

    assert fit(tmp_path, train, workers=0).metrics == {"loss": True}
