"""Horovod's interface: its names, and arguments that are refused. In this process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import polytrain
import polytrain_torch.horovod as hvd
from polytrain_torch.horovod.gradients import GradientReducer
from polytrain_torch.survivors.keeper import keeper

# What `horovod.torch` 0.28.1 exports.
NAMES = """
elastic Compression allgather_object broadcast_object broadcast_optimizer_state
broadcast_parameters allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce
grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async
allgather allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_async
broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown
is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum
Adasum Min Max Product HorovodInternalError DistributedOptimizer SyncBatchNorm
""".split()  # noqa: SIM905  # read more easily


@pytest.mark.parametrize("name", NAMES)
def test_name_is_here_or_has_a_sentence(name: str) -> None:
    if name in hvd.MISSING:
        with pytest.raises(AttributeError, match=rf"has no {name}: \w"):
            getattr(hvd, name)
    else:
        assert name in hvd.__all__
        assert getattr(hvd, name) is not None


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'allredcue'"):
        hvd.allredcue  # noqa: B018


def linear() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters())


def wrapped(**options: Any) -> Any:
    model, optimizer = linear()
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(optimizer, **options)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "adasum": (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), NotImplementedError, "Average"),
    "adasum optimizer": (lambda: wrapped(op=hvd.Adasum), NotImplementedError, "Average"),
    "op": (lambda: hvd.allreduce(torch.ones(1), op="sum"), ValueError, "op='sum'"),
    "average and op": (
        lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
        ValueError,
        "say the same",
    ),
    "process set": (
        lambda: hvd.allreduce(torch.ones(1), process_set=object()),  # type: ignore[arg-type]
        NotImplementedError,
        "one process set",
    ),
    "process sets": (
        lambda: hvd.init(process_sets="dynamic"),  # type: ignore[arg-type]
        NotImplementedError,
        "one process set",
    ),
    "comm": (lambda: hvd.init(comm=[0]), NotImplementedError, "comm"),  # type: ignore[arg-type]
    "root": (lambda: hvd.broadcast(torch.ones(1), root_rank=5), ValueError, "root_rank=5"),
    "splits": (lambda: hvd.alltoall(torch.ones(3), splits=[2]), ValueError, "add up to 3"),
    "scalar": (lambda: hvd.allgather(torch.ones(())), ValueError, "first dimension"),
    "parameters": (lambda: hvd.broadcast_parameters(3, 0), ValueError, "model.state_dict"),
    "passes": (lambda: wrapped(backward_passes_per_step=0), ValueError, "passes_per_step=0"),
    "predivide": (
        lambda: wrapped(gradient_predivide_factor=2.0, op=hvd.Sum),
        ValueError,
        "gradient_predivide_factor=2.0",
    ),
    "names": (lambda: wrapped(named_parameters=[torch.ones(1)]), ValueError, "pairs of name"),
    "no names": (lambda: wrapped(named_parameters=[]), ValueError, "has 2 more"),
    "names twice": (
        lambda: wrapped(named_parameters=[("a", torch.ones(1)), ("a", torch.ones(1))]),
        ValueError,
        "named 'a'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(run: Any, name: str) -> None:
    call, kind, words = WRONG[name]

    def train() -> None:
        if "comm" not in name and "sets" not in name:
            hvd.init()
        with pytest.raises(kind, match=words):
            call()

    run(train)


def test_poll_of_a_group_tells_of_all_its_operations(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late:
        """The work of an operation that other ranks haven't begun."""

        is_over = False

        def is_completed(self) -> bool:
            return self.is_over

        def wait(self) -> None:
            self.is_over = True

    def train() -> None:
        hvd.init()
        own, works = dist.all_gather, [Late(), Late()]
        upcoming = iter(works)

        def all_gather(parts: Any, tensor: Any, async_op: bool = False) -> Any:
            own(parts, tensor)
            return next(upcoming) if async_op else None

        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_gather", all_gather)
            handle = hvd.grouped_allgather_async([torch.ones(2), torch.zeros(1)])
        works[0].wait()
        assert not hvd.poll(handle)
        works[1].wait()
        assert hvd.poll(handle)
        assert [each.tolist() for each in hvd.synchronize(handle)] == [[1, 1], [0]]

    run(train)


@pytest.mark.parametrize("scheduled", [lambda own, _: own, lambda _, wrapped: wrapped])
def test_optimizer_is_the_one_that_it_wraps(run: Any, scheduled: Any) -> None:
    def train() -> None:
        hvd.init()
        model, optimizer = linear()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        distributed = hvd.DistributedOptimizer(optimizer)
        assert isinstance(distributed, torch.optim.Adam)
        assert str(distributed.state_dict()) == str(before)
        # Scripts make it before or after.
        scheduler = torch.optim.lr_scheduler.StepLR(scheduled(optimizer, distributed), 1, gamma=0.5)
        steps: list[int] = []
        distributed.register_step_post_hook(lambda *_: steps.append(1))
        distributed.load_state_dict(before)
        distributed.step()
        scheduler.step()
        assert distributed.param_groups[0]["lr"] == 0.0005
        assert steps == [1]

    run(train)


def test_step_after_synchronize_warns(run: Any) -> None:
    def train() -> None:
        hvd.init()
        distributed = wrapped()
        distributed.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            distributed.step()

    run(train)


def test_a_script_may_go_on_after_gradients_that_changed_were_refused(run: Any) -> None:
    def train() -> None:
        hvd.init()
        model, _ = linear()
        parameters = [*model.parameters()]
        reducer = GradientReducer(
            parameters=parameters,
            passes=1,
            op=hvd.Sum,
            predivide=1.0,
            compression=hvd.Compression.none,
        )
        model(torch.ones(2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        with pytest.raises(RuntimeError, match="clipped"):
            reducer.synchronize()
        assert not reducer.is_under_way
        model.zero_grad()
        model(torch.ones(2)).sum().backward()
        reducer.synchronize()
        assert [each.grad.flatten().tolist() for each in parameters] == [[1, 1], [1]]

    run(train)


def test_state_goes_back_to_the_last_save(run: Any) -> None:
    def train() -> None:
        hvd.init()
        model, optimizer = linear()
        state = hvd.elastic.TorchState(
            model=model, optimizer=optimizer, epoch=1, seen=[1], directory="logs"
        )
        weights = copy.deepcopy(model.state_dict())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        state.epoch, state.seen = 2, [*state.seen, 2]
        state.restore()
        assert str(model.state_dict()) == str(weights)
        assert optimizer.state_dict()["state"] == {}
        assert (state.epoch, state.seen) == (1, [1])
        state.epoch = 5
        state.commit()
        state.epoch = 6
        state.restore()
        assert state.epoch == 5
        polytrain.report({"done": 1})

    assert [each.get("epoch") for each in run(train).history] == [5, None]


class CountsLoads:
    loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        CountsLoads.loads += 1


def test_a_script_that_resumes_from_a_commit_keeps_no_steps_between_commits(run: Any) -> None:
    """They don't have the values that its state had then."""
    kept = []

    def train() -> None:
        hvd.init()
        model, optimizer = linear()
        state = hvd.elastic.TorchState(
            model=model, optimizer=optimizer, epoch=1, counts=CountsLoads()
        )
        before = keeper()
        if state.resume():
            kept.append(keeper() is not before)
        state.commit()
        state.commit()

    CountsLoads.loads = 0
    resumed = run(train).checkpoint
    # Only the first commit is read back.
    assert CountsLoads.loads == 1
    run(train, restore_from=resumed)
    assert kept == [False]


def test_sampler_divides_what_is_left(run: Any) -> None:
    def train() -> None:
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(range(10), seed=3)
        first = [*sampler]
        assert sorted(first) == [*range(10)]
        sampler.record_batch(0, 4)
        saved = sampler.state_dict()
        sampler.load_state_dict(saved)
        assert [*sampler] == first[4:]
        assert len(sampler) == 6
        sampler.set_epoch(1)
        assert sorted(sampler) == [*range(10)]
        assert [*sampler] != first
        assert [*hvd.elastic.ElasticSampler(range(10), shuffle=False)] == [*range(10)]

    run(train)


def test_a_handle_has_one_result(run: Any) -> None:
    def train() -> None:
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(2))
        assert torch.equal(hvd.synchronize(handle), torch.ones(2))
        assert hvd.synchronize(handle) is None
        assert hvd.poll(handle)

    run(train)


@pytest.mark.parametrize(("rows", "processed"), [(1, 0), (5, 4), (6, 4), (8, 8)])
def test_each_of_many_ranks_gets_as_many_of_a_few_items(
    monkeypatch: pytest.MonkeyPatch, rows: int, processed: int
) -> None:
    """Otherwise some ranks would wait in a step for others that have no batch."""
    monkeypatch.setattr(hvd.elastic, "size", lambda: 4)
    drawn = []
    for rank in range(4):
        monkeypatch.setattr(hvd.elastic, "rank", lambda rank=rank: rank)
        sampler = hvd.elastic.ElasticSampler(range(rows), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": processed})
        drawn.append([*sampler])
        assert len(drawn[-1]) == len(sampler) == (rows > processed)
    assert {item for items in drawn for item in items} == {*range(processed, rows)}
