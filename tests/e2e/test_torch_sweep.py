"""Every sampler, data set and optimizer of torch on two workers, killed once in mid-epoch.

Rows are compared with an uninterrupted run and with what one process reads, optimizers with plain
DDP over gloo. The tables in `docs/torch.md` have the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from tests.e2e.torch_runs import fit
from tests.e2e.torch_tables import table

from polytrain import RunConfig

ROWS = 24


def reads(config: dict[str, Any]) -> None:
    """Takes three batches of every loader, saves, is killed, and takes the rest and an epoch."""
    import os
    import signal

    import torch
    import torch.distributed as dist
    import torch.utils.data as data

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader, seed_everything

    class Squares(data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return ROWS

    class Stream(data.IterableDataset[int]):
        def __init__(self, start: int, stop: int) -> None:
            self.rows = range(start, stop)

        def __iter__(self) -> Any:
            return iter(self.rows)

    class Stateful(Stream):
        place = 0

        def __iter__(self) -> Any:
            begin, self.place = self.place, 0
            for self.place in range(begin + 1, ROWS + 1):
                yield self.place - 1
            self.place = 0

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    class Backwards(data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter(range(ROWS - 1, -1, -1))

        def __len__(self) -> int:
            return ROWS

    class Pipe(data.IterDataPipe[int]):
        def __iter__(self) -> Any:
            return iter(range(ROWS))

    class FramePipe(data.DFIterDataPipe):
        def __iter__(self) -> Any:
            return iter(range(ROWS))

    class MapPipe(data.MapDataPipe[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return ROWS

    seed_everything(1)
    rows = [*range(ROWS)]
    tensor = torch.arange(ROWS)
    loaders: dict[str, Any] = {
        "SequentialSampler": data.DataLoader(rows, 2, sampler=data.SequentialSampler(rows)),
        "RandomSampler": data.DataLoader(rows, 2, sampler=data.RandomSampler(rows)),
        "SubsetRandomSampler": data.DataLoader(rows, 2, sampler=data.SubsetRandomSampler(rows)),
        "WeightedRandomSampler": data.DataLoader(
            rows, 2, sampler=data.WeightedRandomSampler([1.0] * ROWS, ROWS, replacement=False)
        ),
        "DistributedSampler": data.DataLoader(rows, 2, sampler=data.DistributedSampler(rows)),
        "BatchSampler": data.DataLoader(
            rows, batch_sampler=data.BatchSampler(data.RandomSampler(rows), 2, drop_last=False)
        ),
        "Sampler": data.DataLoader(rows, 2, sampler=Backwards()),
        "Dataset": data.DataLoader(Squares(), 2, shuffle=True),
        "TensorDataset": data.DataLoader(data.TensorDataset(tensor), 2, shuffle=True),
        "Subset": data.DataLoader(data.Subset(rows, rows[::-1]), 2, shuffle=True),
        "ConcatDataset": data.DataLoader(data.ConcatDataset([rows[:5], rows[5:]]), 2, shuffle=True),
        "StackDataset": data.DataLoader(data.StackDataset(tensor), 2, shuffle=True),
        "MapDataPipe": data.DataLoader(MapPipe(), 2, shuffle=True),
        "DataLoader": data.DataLoader(
            rows, 2, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=4
        ),
        "IterableDataset": data.DataLoader(Stream(0, ROWS), 2),
        "IterableDataset with a state": data.DataLoader(Stateful(0, ROWS), 2),
        "ChainDataset": data.DataLoader(data.ChainDataset([Stream(0, 5), Stream(5, ROWS)]), 2),
        "IterDataPipe": data.DataLoader(Pipe(), 2),
        "DFIterDataPipe": data.DataLoader(FramePipe(), 2),
    }
    rank, attempt = dist.get_rank(), polytrain.get_context().get_attempt()
    state = TrainingState()
    done = state.restore()
    prepared = {name: prepare_data_loader(loader) for name, loader in loaders.items()}
    seen: dict[str, list[list[int]]] = {name: [] for name in prepared}

    def numbers(batch: Any) -> list[int]:
        return (batch[0] if isinstance(batch, list | tuple) else batch).tolist()

    def keep() -> None:
        Path(config["output"], f"{rank}-{attempt}.json").write_text(json.dumps(seen))

    if config["is_killed"] and not done:
        begun = {name: iter(loader) for name, loader in prepared.items()}
        for name, batches in begun.items():
            seen[name].append([row for _ in range(3) for row in numbers(next(batches))])
        state.report({}, begun=True)
        keep()
        if rank == 0:
            polytrain.get_checkpoint()  # It waits for the commit
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    for _ in range(2):
        for name, loader in prepared.items():
            seen[name].append([row for batch in loader for row in numbers(batch)])
    keep()


Rows = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rows]]:
    """By "uninterrupted", "before" and "after": of each rank, each loader's rows."""
    seen: dict[str, list[Rows]] = {}

    def read(name: str, output: Path, attempt: int) -> None:
        files = [output / f"{rank}-{attempt}.json" for rank in range(2)]
        seen[name] = [json.loads(file.read_text()) for file in files]

    for is_killed in (False, True):
        output = tmp_path_factory.mktemp("output")
        quiet = RunConfig(storage_path=tmp_path_factory.mktemp("runs"), progress=False)
        config = {"output": str(output), "is_killed": is_killed}
        assert fit(quiet, reads, config).restarts == is_killed
        read("before" if is_killed else "uninterrupted", output, 0)
        if is_killed:
            read("after", output, 1)
    return seen


LOADERS = table("torch.md", "sampler, data set or loader")


def outcome(rows: dict[str, list[Rows]], name: str) -> str:
    """What has become of a loader's place."""
    pairs = [
        (before[name] + after[name], whole[name])
        for before, after, whole in zip(
            rows["before"], rows["after"], rows["uninterrupted"], strict=True
        )
    ]
    if all([begun + rest, following] == whole for (begun, rest, following), whole in pairs):
        return "exact"
    if all([rest, following] == whole for (_, rest, following), whole in pairs):
        return "its epoch again"
    return "differs"


@pytest.mark.parametrize("name", LOADERS)
def test_places_are_what_the_table_says(rows: dict[str, list[Rows]], name: str) -> None:
    assert outcome(rows, name) == LOADERS[name]


@pytest.mark.parametrize("name", LOADERS)
def test_every_row_comes_once_in_each_epoch(rows: dict[str, list[Rows]], name: str) -> None:
    for epoch in range(2):
        first, second = (rank[name][epoch] for rank in rows["uninterrupted"])
        assert sorted(first + second) == [*range(ROWS)]


def test_the_table_has_every_public_class_that_gives_rows() -> None:
    public = {
        name
        for name in torch.utils.data.__all__
        if name.endswith(("Sampler", "Dataset", "Subset", "Pipe", "Loader"))
    }
    assert public == {name for name in LOADERS if " " not in name}


def steps() -> None:
    """Trains with every optimizer: with plain DDP, with ours, and restored in the middle."""
    import tempfile

    import torch
    import torch.distributed as dist

    import polytrain
    from polytrain_torch import TrainingState, prepare_model
    from polytrain_torch.checkpoints.parts import directory_of_all

    rank = dist.get_rank()
    gloo = {"process_group": dist.group.WORLD}

    class Regression(torch.nn.Module):
        def __init__(self, is_sparse: bool) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(8, 4, sparse=is_sparse)
            self.layer = torch.nn.Linear(4, 4, bias=False)
            self.layer.requires_grad_(not is_sparse)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layer(self.table(rows)).square().mean()

    def made(kind: Any, **arguments: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = prepare_model(
            Regression(kind is torch.optim.SparseAdam), parallel_strategy_kwargs=arguments
        )
        trained = [each for each in model.parameters() if each.requires_grad]
        return model, kind(trained, lr=0.1)

    def train(model: Any, optimizer: Any, first: int, last: int) -> list[torch.Tensor]:
        for step in range(first, last):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + rank)
                loss = model(torch.randint(0, 8, (6,), generator=generator))
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    found = {}
    for name in dir(torch.optim):
        kind = getattr(torch.optim, name)
        is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not is_optimizer or kind is torch.optim.Optimizer:
            continue
        plain = train(*made(kind, **gloo), 0, 4)
        model, optimizer = made(kind)
        train(model, optimizer, 0, 2)
        with directory_of_all() as directory:
            parts = {"model": model, "optimizer": optimizer}
            if rank == 0:
                TrainingState(**parts).save(directory)
            else:
                with tempfile.TemporaryDirectory() as own:
                    TrainingState(**parts).save(own)
            dist.barrier()
            other, its = made(kind)
            TrainingState(model=other, optimizer=its).restore(polytrain.Checkpoint(str(directory)))
        ours, resumed = train(model, optimizer, 2, 4), train(other, its, 2, 4)
        is_exact = all(map(torch.equal, ours, resumed)) and all(map(torch.equal, ours, plain))
        assert not torch.equal(plain[0], made(kind, **gloo)[0].module.table.weight)
        found[name] = "exact" if is_exact else "differs"
    polytrain.report(found)


OPTIMIZERS = table("torch.md", "optimizer")


def test_optimizers_are_what_the_table_says(quiet: RunConfig) -> None:
    """As with plain DDP over gloo, also if they are restored in the middle, to the last bit."""

    def train(config: dict[str, Any]) -> None:
        steps()

    assert fit(quiet, train, {}).metrics == OPTIMIZERS
