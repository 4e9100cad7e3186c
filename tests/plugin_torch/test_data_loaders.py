"""A prepared data loader deals its samples out to the ranks, and stays what its user made it.

One world of two local processes runs every loader; the tests look at what each rank has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.plugin_torch.conftest import Run

from polytrain.testing.local_world import run_world
from polytrain_torch import Torch

Epochs = list[list[int]]
EVEN, ODD = 12, 13
"""Sizes of the data sets: one that two ranks divide evenly, and one that they don't."""


def training_function() -> Callable[[Any], None]:
    """What both ranks run. Nested, so that it travels by value."""

    def train(config: Any) -> None:
        import torch
        import torch.utils.data as data

        import polytrain
        from polytrain_torch import prepare_data_loader

        class Stream(data.IterableDataset[int]):
            def __init__(self, rows: int) -> None:
                self.rows = rows

            def __iter__(self) -> Any:
                return iter(range(self.rows))

        def two_epochs(loader: Any) -> Epochs:
            epochs = []
            for epoch in range(2):
                # As scripts for torchrun do.
                if not isinstance(loader.sampler, list):
                    loader.sampler.set_epoch(epoch)
                epochs.append([int(i) for batch in loader for i in batch.flatten()])
            return epochs

        even, odd = torch.arange(EVEN), torch.arange(ODD)
        backwards = [10, 8, 6, 4, 2, 0]
        batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
        weights = torch.ones(EVEN)
        loaders: dict[str, Any] = {
            "in order": data.DataLoader(even, batch_size=3),
            "shuffled": data.DataLoader(even, batch_size=4, shuffle=True),
            "shuffled once more": data.DataLoader(even, batch_size=4, shuffle=True),
            "uneven": data.DataLoader(odd, batch_size=4),
            "uneven shuffled": data.DataLoader(odd, batch_size=4, shuffle=True),
            "drop last": data.DataLoader(odd, batch_size=4, drop_last=True),
            "own sampler": data.DataLoader(even, batch_size=2, sampler=backwards),
            "random subset": data.DataLoader(
                even, batch_size=2, sampler=data.SubsetRandomSampler(backwards)
            ),
            "first four": data.DataLoader(
                even, batch_size=2, sampler=data.SequentialSampler(range(4))
            ),
            "weighted": data.DataLoader(
                even, sampler=data.WeightedRandomSampler(weights, num_samples=20)
            ),
            "own batches": data.DataLoader(even, batch_sampler=batches),
            "torch's batches": data.DataLoader(
                even, batch_sampler=data.BatchSampler(backwards, batch_size=2, drop_last=False)
            ),
            "one by one": data.DataLoader(even, batch_size=None),
            "processes": data.DataLoader(
                even,
                batch_size=2,
                shuffle=True,
                num_workers=1,
                persistent_workers=True,
                prefetch_factor=3,
                in_order=False,
            ),
            "split already": data.DataLoader(
                even, sampler=data.DistributedSampler(even, shuffle=False)
            ),
            "stream": data.DataLoader(Stream(EVEN), batch_size=4),
            "uneven stream": data.DataLoader(Stream(ODD), batch_size=4),
            "stream by a process": data.DataLoader(Stream(EVEN), batch_size=2, num_workers=1),
        }
        seen = {}
        for name, loader in loaders.items():
            prepared = prepare_data_loader(loader)
            seen[name] = {
                "epochs": two_epochs(prepared),
                "batches": len([*prepared]),
                "told batches": None if "stream" in name else len(prepared),
            }
        kept = prepare_data_loader(loaders["processes"])
        names = ["persistent_workers", "prefetch_factor", "num_workers", "batch_size", "in_order"]
        seen["kept"] = {name: getattr(kept, name) for name in names}
        whole = prepare_data_loader(loaders["in order"], add_dist_sampler=False)
        seen["not split"] = {"epochs": two_epochs(whole)}
        whole = prepare_data_loader(loaders["stream"], add_dist_sampler=False)
        seen["stream not split"] = {"epochs": two_epochs(whole)}
        polytrain.report(seen)

    return train


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has seen."""
    record = run_world(
        Torch(timeout_s=60),
        data=pa.table({"x": [1.0, 2.0]}),
        path=Path(tmp_path_factory.mktemp("world")),
        training_function=training_function(),
        training_config={},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    return [dict(rank.reports[0].metrics) for rank in record.ranks]


def epoch(ranks: list[dict[str, Any]], name: str, number: int = 0) -> list[list[int]]:
    """The samples that each rank has seen in one epoch, in order."""
    return [rank[name]["epochs"][number] for rank in ranks]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["in order", "shuffled", "one by one", "processes"])
def test_every_sample_is_seen_exactly_once_in_every_epoch(
    ranks: Any, name: str, number: int
) -> None:
    first, second = epoch(ranks, name, number)
    assert sorted([*first, *second]) == list(range(EVEN))
    assert len(first) == len(second)


@pytest.mark.parametrize("name", ["shuffled", "uneven shuffled", "processes"])
def test_each_epoch_has_an_order_of_its_own(ranks: Any, name: str) -> None:
    assert epoch(ranks, name, 0) != epoch(ranks, name, 1)


def test_an_unshuffled_loader_keeps_its_order(ranks: Any) -> None:
    for number in (0, 1):
        first, second = epoch(ranks, "in order", number)
        assert first == sorted(first)
        assert second == sorted(second)


@pytest.mark.parametrize("name", ["uneven", "uneven shuffled"])
def test_what_does_not_divide_evenly_is_seen_once_in_equally_many_batches(
    ranks: Any, name: str
) -> None:
    first, second = epoch(ranks, name)
    assert sorted([*first, *second]) == list(range(ODD))
    assert ranks[0][name]["batches"] == ranks[1][name]["batches"] == 2


def test_global_batches_of_an_unshuffled_loader_are_those_of_one_process(ranks: Any) -> None:
    """Batches of three on two ranks: the samples that one process takes six at a time."""
    first, second = epoch(ranks, "in order")
    assert (first, second) == ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11])


def test_the_last_incomplete_batch_may_be_dropped(ranks: Any) -> None:
    assert [len(seen) for seen in epoch(ranks, "drop last")] == [4, 4]


@pytest.mark.parametrize("name", ["own sampler", "random subset"])
def test_a_users_sampler_decides_what_is_seen(ranks: Any, name: str) -> None:
    for number in (0, 1):
        first, second = epoch(ranks, name, number)
        assert sorted([*first, *second]) == [0, 2, 4, 6, 8, 10]


def test_a_users_sampler_decides_the_order(ranks: Any) -> None:
    assert epoch(ranks, "own sampler") == [[10, 6, 2], [8, 4, 0]]


def test_a_plain_sampler_over_a_part_of_the_data_is_a_users_choice_too(ranks: Any) -> None:
    first, second = epoch(ranks, "first four")
    assert sorted([*first, *second]) == [0, 1, 2, 3]


def test_a_random_draw_is_dealt_out_not_drawn_twice(ranks: Any) -> None:
    """Twenty of twelve, with replacement: ten for each rank, and another draw next time."""
    assert [len(seen) for seen in epoch(ranks, "weighted")] == [10, 10]
    assert epoch(ranks, "weighted", 0) != epoch(ranks, "weighted", 1)


def test_a_users_batches_stay_whole(ranks: Any) -> None:
    assert epoch(ranks, "own batches") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_batch_sampler_of_torchs_own_class_is_the_users_too(ranks: Any) -> None:
    assert epoch(ranks, "torch's batches") == [[10, 8, 2, 0], [6, 4, 10, 8]]


def test_loaders_of_the_same_data_have_orders_of_their_own(ranks: Any) -> None:
    """As where a training function makes one for every epoch."""
    assert epoch(ranks, "shuffled") != epoch(ranks, "shuffled once more")


def test_processes_and_prefetching_stay_as_they_were(ranks: Any) -> None:
    for rank in ranks:
        assert rank["kept"] == {
            "persistent_workers": True,
            "prefetch_factor": 3,
            "num_workers": 1,
            "batch_size": 2,
            "in_order": False,
        }


@pytest.mark.parametrize("name", ["not split", "stream not split"])
def test_what_is_not_to_be_split_is_seen_by_all(ranks: Any, name: str) -> None:
    assert epoch(ranks, name) == [list(range(EVEN))] * 2


@pytest.mark.parametrize("name", ["stream", "stream by a process"])
def test_the_items_of_a_stream_are_dealt_out(ranks: Any, name: str) -> None:
    for number in (0, 1):
        assert epoch(ranks, name, number) == [[*range(0, EVEN, 2)], [*range(1, EVEN, 2)]]


def test_no_item_of_a_stream_is_left_out(ranks: Any) -> None:
    """The first one comes twice instead, as in `DistributedSampler`."""
    for number in (0, 1):
        assert epoch(ranks, "uneven stream", number) == [
            list(range(0, ODD, 2)),
            [*range(1, ODD, 2), 0],
        ]


def test_what_is_split_already_is_not_split_again(ranks: Any) -> None:
    assert epoch(ranks, "split already") == [list(range(0, EVEN, 2)), list(range(1, EVEN, 2))]


def test_the_length_is_the_number_of_batches(ranks: Any) -> None:
    for rank in ranks:
        told = {
            name: (r["told batches"], r["batches"]) for name, r in rank.items() if "batches" in r
        }
        assert len(told) > 10
        known = {name: each for name, each in told.items() if "stream" not in name}
        assert all(said == given for said, given in known.values()), known


def test_a_schedule_by_the_length_is_the_same_after_a_restart(run: Run) -> None:
    """What is left of an epoch is less than its length."""

    def train() -> None:
        from torch.utils.data import DataLoader

        from polytrain_torch import TrainingState, prepare_data_loader

        state = TrainingState()
        is_first = not state.restore()
        loader = prepare_data_loader(DataLoader([*range(12)], batch_size=2, sampler=range(12)))
        for given, _ in enumerate(loader, start=1):
            state.report({"length": len(loader), "given": given}, begun=True)
            if is_first and given == 4:
                break

    first = run(train)
    assert first.metrics == {"length": 6, "given": 4}
    assert run(train, restore_from=first.checkpoint).metrics == {"length": 6, "given": 2}


@pytest.mark.parametrize("batch_size", [2, None])
def test_an_epoch_that_was_ended_is_followed_by_a_whole_one(
    run: Run, batch_size: int | None
) -> None:
    """Also if nobody has asked whether there is another batch."""

    def train() -> None:
        from torch.utils.data import DataLoader

        from polytrain_torch import TrainingState, prepare_data_loader

        state = TrainingState()
        state.restore()
        loader = prepare_data_loader(DataLoader([*range(12)], batch_size=batch_size))
        left = loader.batches_left()
        for given, _ in enumerate(loader, start=1):
            if given == len(loader):
                loader.end_epoch()
                state.report({"left": left, "length": len(loader)}, begun=True)

    resumed = run(train, restore_from=run(train).checkpoint)
    assert resumed.metrics["left"] == resumed.metrics["length"]
