"""Virtual workers: one number of them, and the same bits at any number of workers."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.sweeps import Selected, only_in_sweep
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import polytrain
from polytrain import InvalidJobError, RunConfig, ScalingConfig, Trainer, make_trainer
from polytrain.testing.local_world import run_world
from polytrain_plugins import load_backend
from polytrain_torch import (
    Torch,
    TrainingState,
    micro_batches,
    prepare_data_loader,
    prepare_model,
)
from polytrain_torch.private import compiled_by_shape
from polytrain_torch.virtual_workers import VirtualWorkers, gradients, loop
from polytrain_torch.virtual_workers.arithmetic import arithmetic, check_resumed, compare_ranks
from polytrain_torch.virtual_workers.deterministic import (
    aligned,
    deterministic,
    why_not_deterministic,
)
from polytrain_torch.virtual_workers.mistakes import LearningRates

WORKERS = 4
ROWS = 150
"""Not a multiple of any batch: the last one of an epoch is uneven."""

rng = np.random.default_rng(0)
TABLE = pa.table(
    {
        "x": list(rng.standard_normal((ROWS, 64), dtype=np.float32)),
        "y": rng.integers(0, 10, ROWS),
    }
)


def in_world(function: Callable[[], None], workers: int, path: Path, **options: Any) -> list[Any]:
    """The metrics that rank 0 reports."""
    record = run_world(
        Torch(),
        data=TABLE,
        path=path / str(workers),
        world_size=workers,
        training_function=function,
        **{"virtual_workers": WORKERS, **options},
    )
    failures = [each.failure for each in record.ranks if each.failure is not None]
    assert not failures, failures
    return [report.metrics for report in record.ranks[0].reports]


def digest(*states: Any) -> str:
    """Of all tensors and numbers."""
    total = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                take(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                take(each)
        elif isinstance(value, torch.Tensor):
            total.update(
                value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            )
        else:
            total.update(repr(value).encode())

    take(states)
    return total.hexdigest()


class Perceptron(torch.nn.Module):
    """With layers that share a weight, that are frozen, and that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Linear(64, 64).requires_grad_(False)
        self.last, self.rare = torch.nn.Linear(64, 10), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, is_rare: bool) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(self.frozen(x)))))
        x = torch.nn.functional.dropout(x, 0.3)
        return self.last(x) + (self.rare(x) if is_rare else 0)


def convolutional() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 10),
    )


def trains_a_perceptron() -> None:
    """On rows of a shard, compiled."""
    torch.manual_seed(1)
    network = Perceptron()
    network.compile(backend="aot_eager")
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shard = polytrain.get_dataset_shard()
    for _ in range(2):
        for batch in shard.iter_torch_batches(global_batch_size=32):
            optimizer.zero_grad()
            for part in micro_batches(batch):
                output = model(part["x"], bool(part["y"][0] == 1))
                loss = torch.nn.functional.cross_entropy(output, part["y"])
                loss.backward()
            optimizer.step()
            polytrain.report({"loss": loss.item(), "draw": torch.rand(()).item()})
    polytrain.report({"hash": digest(model.state_dict(), optimizer.state_dict())})


class Noisy(Dataset[Any]):
    """Augments with random numbers of all three kinds."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, item: int) -> Any:
        x = torch.as_tensor(np.stack(TABLE["x"].to_numpy())[item])
        noise = torch.rand(64) + np.float32(np.random.rand()) + random.random()
        return x + 0.1 * noise, int(TABLE["y"][item].as_py())


def trains_a_convolutional_net() -> None:
    """With what a real loop has: AMP, clipping, a schedule, and averaged weights."""
    torch.manual_seed(2)
    model = prepare_model(convolutional())
    averaged = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = prepare_data_loader(
        DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2, drop_last=False)
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            for x, y in micro_batches(batch):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            averaged.update_parameters(model.module)
            polytrain.report({"loss": loss.item(), "norm": norm.item()})
    states = (model, averaged, optimizer, scheduler, scaler)
    polytrain.report({"hash": digest(*(each.state_dict() for each in states))})


class Critic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(64, 1)
        self.unused = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(torch.nn.functional.dropout(x, 0.2))


def trains_two_models() -> None:
    """A generator and its critic, in turn, each step accumulated over two batches."""
    torch.manual_seed(3)
    generator = prepare_model(torch.nn.Linear(16, 64))
    critic = prepare_model(Critic())
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (critic, generator)]
    sampler = DistributedSampler(range(ROWS), shuffle=True)
    data = TensorDataset(torch.as_tensor(np.stack(TABLE["x"].to_numpy())))
    loader = prepare_data_loader(DataLoader(data, batch_size=8, sampler=sampler))
    for number, batch in enumerate(loader):
        for (x,) in micro_batches(batch):
            fake = generator(torch.randn(len(x), 16)).detach()
            loss = critic(fake).mean() - critic(x).mean()
            (loss / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_value_(critic.parameters(), 0.1)
            optimizers[0].step()
            optimizers[0].zero_grad()
        for (x,) in micro_batches(batch):
            (-critic(generator(torch.randn(len(x), 16))).mean() / 2).backward()
        critic.zero_grad() if number % 2 else None
        if number % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert critic.module.unused.weight.grad is None
    states = (generator, critic, *optimizers)
    polytrain.report({"hash": digest(*(each.state_dict() for each in states))})


@pytest.fixture(scope="module")
def on_one_worker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Return what one worker reports, by its training function."""

    @functools.cache
    def reports(function: Callable[[], None]) -> list[Any]:
        return in_world(function, 1, tmp_path_factory.mktemp("one"))

    return reports


@pytest.mark.sweep
@pytest.mark.parametrize(
    "function", [trains_a_perceptron, trains_a_convolutional_net, trains_two_models]
)
def test_any_number_of_workers_has_the_same_bits(
    on_one_worker: Callable[..., list[Any]],
    selected: Selected,
    function: Callable[[], None],
    tmp_path: Path,
) -> None:
    alone = on_one_worker(function)
    assert alone[-1]["hash"]
    # Three have different numbers of virtual workers.
    for workers in selected((3, 2, 4), one_in=3):
        assert in_world(function, workers, tmp_path) == alone


def trains(model: torch.nn.Module, batches: Any, *, is_eval: bool = False) -> None:
    """Two steps with clipping; reports the norm and the state."""
    model = prepare_model(model).train(not is_eval)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norm = torch.zeros(())
    for batch in islice(batches, 2):
        optimizer.zero_grad()
        for part in micro_batches(batch):
            model(part["x"]).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    TrainingState(model=model).report({"norm": norm.item(), "hash": digest(model.state_dict())})


class Assigning(torch.nn.Module):
    """Assigns its buffers, and makes one of them in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("first", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if self.first is None:
            self.first = x.mean(0)
        return self.inside(x - self.mean) + self.first


def assigns_buffers() -> None:
    torch.manual_seed(4)
    trains(Assigning(), polytrain.get_dataset_shard().iter_torch_batches(batch_size=8))


def seeds_by_rank() -> None:
    torch.manual_seed(4 + torch.distributed.get_rank())
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    trains(network, polytrain.get_dataset_shard().iter_torch_batches(batch_size=8))


def augmented(batch: Any) -> Any:
    x = np.stack([*batch["x"]])
    return {"x": torch.as_tensor(x) + torch.rand(x.shape)}


def augments_in_collate_fn() -> None:
    torch.manual_seed(4)
    shard = polytrain.get_dataset_shard()
    trains(torch.nn.Linear(64, 1), shard.iter_torch_batches(batch_size=8, collate_fn=augmented))


def wherever_memory_is(batch: Any) -> Any:
    """Begin at another address on each rank: matrix products may have other last bits then."""
    x, begin = np.stack([*batch["x"]]), torch.distributed.get_rank()
    memory = torch.empty(begin + x.size)[begin:]
    return {"x": memory.view(x.shape).copy_(torch.as_tensor(x))}


def has_inputs_at_any_address() -> None:
    torch.manual_seed(4)
    shard = polytrain.get_dataset_shard()
    model = prepare_model(torch.nn.Linear(64, 3))
    for batch in shard.iter_torch_batches(batch_size=7, collate_fn=wherever_memory_is):
        model.zero_grad()
        for part in micro_batches(batch):
            model(part["x"]).square().mean().backward()
        polytrain.report({"hash": digest(model.module.weight.grad)})


def clips_in_another_memory_format() -> None:
    torch.manual_seed(4)
    network = torch.nn.Sequential(
        torch.nn.Unflatten(1, (16, 2, 2)), torch.nn.Conv2d(16, 64, 2), torch.nn.Flatten()
    ).to(memory_format=torch.channels_last)
    trains(network, polytrain.get_dataset_shard().iter_torch_batches(batch_size=8))


class OneGradientForTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ (both[0].view(64) + both[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = ctx.saved_tensors[0].T @ gradients[0]
        return None, gradient.view(8, 8), gradient


class OneFactor(torch.nn.Module):
    """Its gradients share memory: two of them all of it, and two an odd part each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Parameter(torch.randn(8, 8))
        self.right = torch.nn.Parameter(torch.randn(64))
        self.joined = torch.nn.ParameterList(torch.randn(size) for size in (3, 61))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([*self.joined])
        return OneGradientForTwo.apply(x, self.left, self.right) + x @ joined


def shares_memory_of_gradients() -> None:
    torch.manual_seed(4)
    trains(OneFactor(), polytrain.get_dataset_shard().iter_torch_batches(batch_size=8))


@pytest.mark.parametrize(
    "function",
    [
        assigns_buffers,
        seeds_by_rank,
        augments_in_collate_fn,
        has_inputs_at_any_address,
        clips_in_another_memory_format,
        shares_memory_of_gradients,
    ],
)
def test_what_a_function_does_in_its_own_way_has_the_same_bits(
    function: Callable[[], None], tmp_path: Path
) -> None:
    assert in_world(function, 2, tmp_path) == in_world(function, 1, tmp_path)


def over_sockets() -> None:
    """As on several nodes: no memory is shared, and networks have several buckets."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    gradients._BUCKET = 1 << 10


def trains_without_compiling() -> None:
    with torch.compiler.set_stance("force_eager"):
        trains_a_perceptron()


def adds_over_sockets() -> None:
    over_sockets()
    trains_without_compiling()


def adds_compiled_gradients_over_sockets() -> None:
    over_sockets()
    trains_a_perceptron()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("by_sockets", "alone"),
    [
        (adds_over_sockets, trains_without_compiling),
        only_in_sweep(adds_compiled_gradients_over_sockets, trains_a_perceptron),
    ],
)
def test_sockets_have_the_bits_of_shared_memory(
    on_one_worker: Callable[..., list[Any]],
    by_sockets: Callable[[], None],
    alone: Callable[[], None],
    tmp_path: Path,
) -> None:
    """Which are those of one worker."""
    assert in_world(by_sockets, 3, tmp_path) == on_one_worker(alone)


def changes_gradients_in_the_loop() -> None:
    """In three ways, each in another step, on the ranks of some virtual workers."""
    torch.manual_seed(5)
    network = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    shard = polytrain.get_dataset_shard()
    for step, batch in enumerate(shard.iter_torch_batches(global_batch_size=32)):
        optimizer.zero_grad()
        for part in micro_batches(batch):
            is_first_row = bool(part["x"][0, 0] > 0)
            # A collective call of the function's own, between sums that have begun.
            if torch.distributed.get_world_size() > 1 and part is batch.micro_batches[-1].content:
                torch.distributed.barrier()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(part["x"]).float().square().mean()
            scaler.scale(loss).backward(retain_graph=True)
            if step == 1 and is_first_row:
                scaler.scale(loss).backward()
            if step == 2:
                for parameter in model.parameters():
                    parameter.grad.data.clamp_(-0.01, 0.01)
            if step == 3 and is_first_row:
                network[2].weight.grad = None
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        polytrain.report({"norm": norm.item(), "hash": digest(model.state_dict())})


def changes_them_over_sockets() -> None:
    over_sockets()
    changes_gradients_in_the_loop()


@pytest.mark.sweep
def test_gradients_that_change_after_their_sum_has_begun_count_as_they_are(
    selected: Selected, tmp_path: Path
) -> None:
    alone = in_world(changes_gradients_in_the_loop, 1, tmp_path)
    assert len(alone) == 5
    for workers in selected((3, 2, 4), one_in=3):
        assert in_world(changes_them_over_sockets, workers, tmp_path) == alone


def inline(function: Callable[[], None], path: Path) -> None:
    make_trainer(
        "torch",
        function,
        datasets={"train": TABLE},
        scaling_config=ScalingConfig(num_workers=0, virtual_workers=WORKERS),
        run_config=RunConfig(storage_path=path, progress=False),
    ).fit()


def loops_wrongly() -> None:
    model = prepare_model(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainingState(model=model)
    data = torch.utils.data.StackDataset(torch.ones(64, 64), torch.ones(64, 1))
    loader = prepare_data_loader(DataLoader(data, batch_size=4))
    assert len(loader) == 4
    with pytest.raises(TypeError, match=r"for x, y in micro_batches\(batch\)"):
        for _x, _y in loader:
            pass
    batch = next(iter(loader))
    with pytest.raises(RuntimeError, match="a prepared model is trained in a loop"):
        model(torch.ones(4, 64))
    for x, _ in micro_batches(batch):
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="Step after the loop"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            state.report({})
        with pytest.raises(RuntimeError, match="began within another one"):
            next(micro_batches(batch))
    optimizer.step()
    for _ in micro_batches(batch):
        break
    with pytest.raises(RuntimeError, match="`continue`, not `break`"):
        optimizer.step()


def steps_a_scheduler_in_the_loop() -> None:
    model = prepare_model(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = iter(polytrain.get_dataset_shard().iter_torch_batches(batch_size=4))
    for part in micro_batches(next(batches)):
        model(part["x"]).sum().backward()
    optimizer.step()
    parts = micro_batches(next(batches))
    for part in islice(parts, 2):
        model(part["x"]).sum().backward()
        scheduler.step()
    with pytest.raises(RuntimeError, match="Step schedulers after the loop"):
        next(parts)


def averages_weights_in_the_loop() -> None:
    model = prepare_model(torch.nn.Linear(64, 1))
    averaged = torch.optim.swa_utils.AveragedModel(model.module)
    batches = iter(polytrain.get_dataset_shard().iter_torch_batches(batch_size=4))
    with torch.no_grad():
        for _ in micro_batches(next(batches)):
            # To try it out: nothing is trained here.
            averaged.update_parameters(model.module)
    for part in micro_batches(next(batches)):
        model(part["x"]).sum().backward()
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"Call update_parameters after the loop"),
        ):
            averaged.update_parameters(model.module)
    averaged.update_parameters(model.module)
    assert averaged.n_averaged == WORKERS + 1


def asks_for_what_isnt_exact() -> None:
    with pytest.raises(ValueError, match=r"'1' is a SyncBatchNorm.*Use BatchNorm"):
        prepare_model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)))
    drawing = torch.nn.Linear(2, 2)
    drawing.generator = torch.Generator()
    with pytest.raises(ValueError, match=r"generator of its own.*torch's default generator"):
        prepare_model(drawing)
    with pytest.raises(ValueError, match=r"parallel_strategy='fsdp'.*Leave virtual_workers out"):
        prepare_model(torch.nn.Linear(2, 2), parallel_strategy="fsdp")
    with pytest.raises(ValueError, match="that prepare_model hasn't made"):
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    shard = polytrain.get_dataset_shard()
    with pytest.raises(ValueError, match=r"30: 4 virtual workers .* such as 28 or 32"):
        next(iter(shard.iter_torch_batches(global_batch_size=30)))
    of_a_rank = DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = DataLoader(range(8), batch_size=2, sampler=of_a_rank)
    with pytest.raises(
        ValueError, match=r"DistributedSampler yields a rank's items.*add_dist_samp"
    ):
        prepare_data_loader(loader)


def compiles_too_many_shapes() -> None:
    compiled = torch.compile(lambda x: x.sum(), backend="eager")
    # After that torch would compile no more shapes, but go on with those that it has.
    with pytest.raises(FailOnRecompileLimitHit):
        [compiled(torch.ones(rows)) for rows in range(2, 100)]
    dynamic = torch.compile(lambda x: x.mean(), backend="eager", dynamic=True)
    assert all(dynamic(torch.ones(rows)) == 1 for rows in range(2, 100))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "function",
    [
        loops_wrongly,
        steps_a_scheduler_in_the_loop,
        averages_weights_in_the_loop,
        asks_for_what_isnt_exact,
        only_in_sweep(compiles_too_many_shapes),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(
    function: Callable[[], None], tmp_path: Path
) -> None:
    inline(function, tmp_path)


def test_code_is_compiled_for_each_size_whatever_was_compiled_before() -> None:
    """By itself torch compiles the second size for all sizes: a restart begins with another one."""
    compiled_for: list[Any] = []

    def compiles(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled_for.extend(each.shape for each in inputs)
        return graph.forward

    compiled = torch.compile(lambda x: x.sum(), backend=compiles)
    with compiled_by_shape():
        for rows in (10, 5, 7, 10, 5):
            compiled(torch.ones(rows, 3))
    assert compiled_for == [(10, 3), (5, 3), (7, 3)]
    assert all(type(size) is int for shape in compiled_for for size in shape)


@pytest.mark.parametrize("first", [0, 15])
def test_parts_of_rows_have_no_gaps_wherever_they_begin(first: int) -> None:
    """Whether a slice happens to be aligned depends on which rows a worker has."""
    rows = torch.arange(31 * 65.0).reshape(31, 65)[first:, 1:]
    assert (rows.data_ptr() % 64 == 0) == (first == 15)
    [found] = aligned([rows])
    assert found.is_contiguous()
    assert torch.equal(found, rows)


def test_algorithms_chosen_by_their_times_are_named_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with deterministic():
        torch.backends.cudnn.benchmark = True
        assert why_not_deterministic() is None
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert "cudnn.benchmark" in (why_not_deterministic() or "")


class Scaled(Dataset[Any]):
    scale = 1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> float:
        return float(self.scale)


def scales(_: int) -> None:
    torch.utils.data.get_worker_info().dataset.scale = 3


def sets_up_loader_processes() -> None:
    loader = DataLoader(Scaled(), batch_size=1, num_workers=1, worker_init_fn=scales)
    for batch in prepare_data_loader(loader):
        assert [part.item() for part in micro_batches(batch)] == [3] * WORKERS


def test_an_inline_run_leaves_torchs_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        inline(sets_up_loader_processes, tmp_path)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


class KnowsItsRank(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) * (1 + torch.distributed.get_rank())


def computes_by_rank() -> None:
    model = prepare_model(KnowsItsRank())
    batch = next(iter(polytrain.get_dataset_shard().iter_torch_batches(batch_size=4)))
    parts = micro_batches(batch)
    for part in islice(parts, WORKERS // 2):
        model(part["x"]).sum().backward()
    with pytest.raises(RuntimeError, match="Rank 1 computes other gradients than rank 0"):
        next(parts)


def trains_on_one_rank() -> None:
    model = prepare_model(torch.nn.Linear(64, 1))
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            model.module.bias.add_(1)
    with pytest.raises(RuntimeError, match="model: rank 1 has another state than rank 0"):
        TrainingState(model=model).report({})


def is_wrong() -> None:
    computes_by_rank()
    trains_on_one_rank()


def test_a_rank_that_differs_is_named(tmp_path: Path) -> None:
    in_world(is_wrong, 2, tmp_path)


class Opaque(torch.nn.Linear):
    """Its output is an object in which torch finds no tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(output=super().forward(x))


class Unsized(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


def is_proven_when_it_is_called() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("polytrain_torch")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    batches = iter(polytrain.get_dataset_shard().iter_torch_batches(batch_size=4))

    def loop(*models: torch.nn.Module) -> None:
        for part in micro_batches(next(batches)):
            for model in models:
                output = model(part["x"])
                getattr(output, "output", output).sum().backward()

    evaluated = prepare_model(KnowsItsRank()).eval()
    with pytest.raises(RuntimeError, match="Rank 1 computes other gradients"):
        loop(evaluated)
    good, opaque = prepare_model(torch.nn.Linear(64, 1)), prepare_model(Opaque(64, 1))
    late, unused = prepare_model(KnowsItsRank()), prepare_model(torch.nn.Linear(64, 1))
    loop(good, opaque)
    with pytest.raises(RuntimeError, match="Rank 1 computes other gradients"):
        loop(good, opaque, late)
    loop(good, unused)
    loop(good, unused)
    loader = DataLoader(range(ROWS), batch_size=2, sampler=Unsized(), num_workers=1)
    with pytest.raises(ValueError, match=r"Unsized has no __len__.*num_workers=0"):
        prepare_data_loader(loader)
    polytrain.report({"said": "\n".join(said)})


def test_each_model_is_proven_or_said_not_to_be(tmp_path: Path) -> None:
    report = in_world(is_proven_when_it_is_called, 2, tmp_path, virtual_workers=3)[-1]
    good, opaque, last = report["said"].splitlines()
    assert "yes for model 2 (Linear)" in good
    assert "not proven for model 3 (Opaque), as no tensor with a gradient" in opaque
    assert "yes for model 5 (Linear)" in last


def test_a_resume_with_other_threads_is_refused() -> None:
    then = arithmetic(WORKERS)
    with pytest.raises(ValueError, match=r"3 when .*, and \d+ now \(threads of each worker\)"):
        list(check_resumed({**then, "threads": 3}, then))
    with pytest.raises(ValueError, match=r"Resume with ScalingConfig\(virtual_workers=8\)"):
        list(check_resumed({**then, "virtual_workers": 8}, then))


@pytest.mark.parametrize(("cuts", "wrong"), [((32, 64), 0), ((16, 64), 1), ((64,), 1)])
def test_only_the_first_batches_of_a_resumed_run_must_be_as_large_as_before(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], wrong: int
) -> None:
    """A training function may go on with larger ones, at any number of workers."""
    warnings: list[str] = []
    monkeypatch.setattr(loop, "warn_inexact", warnings.append)
    before, after = (VirtualWorkers(WORKERS, size, 0) for size in (2, 1))
    before.cut("train", 32)
    after.resume_from(before.arithmetic())
    for rows in cuts:
        after.cut("train", rows)
    assert len(warnings) == wrong
    assert all("had 32 rows on 2 workers" in each for each in warnings)


def test_an_optimizer_that_is_collected_within_a_loop_changes_no_learning_rate() -> None:
    rates = LearningRates()
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    rates.stepped(optimizer)
    old = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.5)
    old.owner = [old]  # a reference cycle, as a trainer makes one
    rates.stepped(old)
    del old
    rates.begin()
    rates.end_micro_batch()
    gc.collect()
    rates.end_micro_batch()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(RuntimeError, match="The learning rate changes within the loop"):
        rates.end_micro_batch()


def test_other_processors_are_named() -> None:
    mine = arithmetic(WORKERS)
    other = {**mine, "cpu": "another one"}
    [of_ranks] = compare_ranks([mine, other])
    assert "rank 1 has another one (CPU)" in of_ranks
    [of_resume] = check_resumed(other, mine)
    assert "another one when the checkpoint was made" in of_resume


@pytest.mark.parametrize(
    ("backend", "scaling", "says"),
    [
        ("torch", {"num_workers": (1, 8)}, "4 virtual workers can't be shared by 8 workers"),
        (
            "torch",
            {"virtual_workers": 1, "num_workers": 2},
            "1 virtual worker can't .*most 1 worker",
        ),
        ("torch", {"virtual_workers": 0}, "0 is not a number of virtual workers"),
        ("lightgbm", {}, "saves the same model at any number of workers"),
        ("tensorflow", {}, "use a backend that has them: torch"),
    ],
)
def test_a_run_that_cant_have_virtual_workers_doesnt_start(
    backend: str, scaling: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidJobError, match=says):
        Trainer(
            load_backend(backend)(),
            None if backend == "lightgbm" else trains_a_perceptron,
            datasets={"train": TABLE},
            scaling_config=ScalingConfig(**{"virtual_workers": WORKERS, **scaling}),
            run_config=RunConfig(storage_path=tmp_path),
        )
