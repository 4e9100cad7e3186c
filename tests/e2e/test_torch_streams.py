"""Iterable data sets and loaders with a state keep their place on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch_runs import fit

from polytrain import RunConfig, ScalingConfig, TrainingFailedError, make_trainer

ROWS = 23
"""Of which two ranks have twelve each, one of them twice."""


def reads_in_pieces(config: dict[str, Any]) -> None:
    """Takes some batches of each loader, saves, fails once, and takes the rest and an epoch."""
    import json

    import datasets
    import torch.distributed as dist
    from torch.utils.data import DataLoader, IterableDataset

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader

    class Stream(IterableDataset[int]):
        """Counts on, from where a state says."""

        def __init__(self) -> None:
            self.next = 0

        def __iter__(self) -> Any:
            while self.next < ROWS:
                self.next += 1
                yield self.next - 1
            self.next = 0

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = state["next"]

    class CountsBatches(DataLoader[int]):
        """A loader with a state, as torchdata's."""

        skipped = given = 0

        def __iter__(self) -> Any:
            self.given, self.skipped = self.skipped, 0
            for number, batch in enumerate(super().__iter__()):
                if number >= self.given:
                    self.given += 1
                    yield batch

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.skipped = state["given"]

    class Plain(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(ROWS))

    table = datasets.Dataset.from_dict({"row": [*range(ROWS)]})
    loaders: dict[str, Any] = {
        "a data set with a state": DataLoader(Stream(), batch_size=2),
        "unsplit": DataLoader(Stream(), batch_size=2),
        "of Hugging Face": DataLoader(table.to_iterable_dataset(), batch_size=2),
        "shuffled, of Hugging Face": DataLoader(
            table.to_iterable_dataset().shuffle(seed=3, buffer_size=1), batch_size=2
        ),
        "a loader with a state": CountsBatches(Plain(), batch_size=2),
        "by processes": CountsBatches(Plain(), batch_size=2, num_workers=1),
    }
    rank, attempt = dist.get_rank(), polytrain.get_context().get_attempt()
    state = TrainingState()
    done = state.restore()
    prepared = {
        name: prepare_data_loader(loader, add_dist_sampler=name != "unsplit")
        for name, loader in loaders.items()
    }
    seen: dict[str, list[list[int]]] = {name: [] for name in prepared}

    def rows(batch: Any) -> list[int]:
        return (batch["row"] if isinstance(batch, dict) else batch).tolist()

    def keep() -> None:
        Path(config["output"], f"{rank}-{attempt}.json").write_text(json.dumps(seen))

    if not done:
        begun = {name: iter(loader) for name, loader in prepared.items()}
        for name, batches in begun.items():
            seen[name].append([row for _ in range(3) for row in rows(next(batches))])
        state.report({}, begun=True)
        keep()
        if config["fails"]:
            if rank == 0:
                polytrain.get_checkpoint()  # It waits for the commit
            dist.barrier()
            raise OSError("once")
        return
    for _ in range(2):
        for name, loader in prepared.items():
            seen[name].append([row for batch in loader for row in rows(batch)])
    keep()


KINDS = [
    "a data set with a state",
    "of Hugging Face",
    "shuffled, of Hugging Face",
    "a loader with a state",
    "by processes",
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank has taken, by loader: before the failure, after it, and in the next epoch."""
    import json

    output = tmp_path_factory.mktemp("output")
    quiet = RunConfig(storage_path=tmp_path_factory.mktemp("runs"), progress=False)
    result = fit(quiet, reads_in_pieces, {"output": str(output), "fails": True})
    assert result.restarts == 1
    ranks = [
        [json.loads((output / f"{rank}-{attempt}.json").read_text()) for attempt in range(2)]
        for rank in range(2)
    ]
    return {
        name: [before[name] + after[name] for before, after in ranks]
        for name in (*KINDS, "unsplit")
    }


@pytest.mark.parametrize("name", KINDS)
def test_each_rank_goes_on_at_its_place(seen: dict[str, Any], name: str) -> None:
    for before, after, following in seen[name]:
        assert len(before) == 6
        assert before + after == following, (before, after, following)
    (*_, first), (*_, second) = seen[name]
    assert len(first) == len(second) == 12
    together = [row for pair in zip(first, second, strict=True) for row in pair]
    assert sorted(together[:ROWS]) == [*range(ROWS)]
    assert together[-1] == together[0]


def test_a_data_set_that_is_not_split_keeps_its_place(seen: dict[str, Any]) -> None:
    for before, after, following in seen["unsplit"]:
        assert len(before) == 6
        assert before + after == following == [*range(ROWS)]


def test_another_number_of_workers_is_refused(quiet: RunConfig, tmp_path: Path) -> None:
    config = {"output": str(tmp_path), "fails": False}
    begun = fit(quiet, reads_in_pieces, config)
    with pytest.raises(
        TrainingFailedError,
        match=r"data loader 0: .*middle of epoch 0.*by 2 workers.*are 1 now.*num_workers=2",
    ):
        fit(quiet, reads_in_pieces, config, workers=1, restore_from=begun.checkpoint)


def reads_pipes() -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from torch.utils.data.datapipes.iter import IterableWrapper

    import polytrain
    from polytrain_torch import prepare_data_loader

    torch.manual_seed(dist.get_rank())
    rows = [*range(24)]
    loaders = {
        "plain": DataLoader(IterableWrapper(rows), batch_size=2),
        "shuffled": DataLoader(IterableWrapper(rows).shuffle(), batch_size=2, shuffle=True),
        "divided": DataLoader(
            IterableWrapper(rows).shuffle().sharding_filter(), batch_size=2, shuffle=True
        ),
        "divided by processes": DataLoader(
            IterableWrapper(rows).shuffle().sharding_filter(),
            batch_size=2,
            shuffle=True,
            num_workers=2,
        ),
    }
    seen = {}
    for name, loader in loaders.items():
        prepared = prepare_data_loader(loader)
        epochs = [[int(row) for batch in prepared for row in batch] for _ in range(2)]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, epochs)
        seen[name] = [sorted(first + second) for first, second in zip(*ranks, strict=True)]
        if name != "plain":
            assert epochs[0] != epochs[1]
    polytrain.report(seen)


def test_every_row_of_a_pipe_comes_once(quiet: RunConfig) -> None:
    seen = make_trainer(
        "torch", reads_pipes, scaling_config=ScalingConfig(num_workers=2), run_config=quiet
    ).fit()
    for name, epochs in seen.metrics.items():
        assert epochs == [[*range(24)]] * 2, name
