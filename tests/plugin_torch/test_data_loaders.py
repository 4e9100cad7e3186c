"""A prepared data loader deals its samples out to the ranks, and stays what its user made it.

One world of two local processes runs every loader; the tests look at what each rank has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tests.plugin_torch.conftest import Run
from torch.utils.data import DistributedSampler

from polytrain.testing.local_world import run_world
from polytrain_torch import Torch

Epochs = list[list[int]]
EVEN, ODD = 12, 13
"""Sizes of the data sets: one that two ranks divide evenly, and one that they don't."""


def training_function() -> Callable[[Any], None]:
    """What both ranks run. Nested, so that it travels by value."""

    def train(config: Any) -> None:
        import torch.distributed as dist
        import torch.utils.data as data

        import polytrain
        from polytrain_torch import prepare_data_loader
        from polytrain_torch.loaders.prepared import sharded

        class Stream(data.IterableDataset[int]):
            def __init__(self, rows: int) -> None:
                self.rows = rows

            def __iter__(self) -> Any:
                return iter(range(self.rows))

        class Seeds(data.IterableDataset[int]):
            """Those of its worker process, for each rank."""

            def __iter__(self) -> Any:
                return iter([torch.initial_seed()] * 2)

        class PairsOfParity(data.Sampler[list[int]]):
            """Batches of two items of the same parity, as detection recipes group images."""

            def __init__(self, sampler: Any) -> None:
                self.sampler = sampler

            def __iter__(self) -> Any:
                waiting: dict[int, int] = {}
                for index in self.sampler:
                    if index % 4 in waiting:
                        yield [waiting.pop(index % 4), index]
                    else:
                        waiting[index % 4] = index

            def __len__(self) -> int:
                return 2 * (len(self.sampler) // 4)

        class Interleaved(data.Sampler[int]):
            """Knows its rank, as samplers of libraries do, and isn't torch's."""

            def __init__(self, rank: int, num_replicas: int) -> None:
                self.rank, self.num_replicas = rank, num_replicas

            def __iter__(self) -> Any:
                return iter(range(self.rank, EVEN, self.num_replicas))

            def __len__(self) -> int:
                return EVEN // self.num_replicas

        def distributed(*, items: Any = None, **options: Any) -> Any:
            return data.DistributedSampler(even if items is None else items, **options)

        def flat(loader: Any) -> list[int]:
            return [int(i) for batch in loader for i in batch.flatten()]

        def two_epochs(loader: Any) -> Epochs:
            epochs = []
            for epoch in range(2):
                # As scripts for torchrun do.
                inner = getattr(loader.batch_sampler, "sampler", None)
                if isinstance(inner, data.DistributedSampler):
                    inner.set_epoch(epoch)
                elif not isinstance(loader.sampler, list):
                    loader.sampler.set_epoch(epoch)
                epochs.append(flat(loader))
            return epochs

        class Tenfold(data.DataLoader[Any]):
            def __iter__(self) -> Any:
                return (batch * 10 for batch in super().__iter__())

        class Twice(data.DataLoader[Any]):
            def __iter__(self) -> Any:
                return (batch for batch in super().__iter__() for _ in range(2))

        class Sometimes(data.DataLoader[Any]):
            def __iter__(self) -> Any:
                return (batch for batch in super().__iter__() if batch[0] % 4 == 0)

        class Unsized(data.Dataset[int]):
            def __getitem__(self, index: int) -> int:
                return index

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
            "own loader": Tenfold(even, batch_size=2, sampler=backwards),
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
            "batches of a part": data.DataLoader(
                even,
                batch_sampler=data.BatchSampler(distributed(), batch_size=2, drop_last=False),
            ),
            "groups of a part": data.DataLoader(
                even, batch_sampler=PairsOfParity(distributed(shuffle=False))
            ),
            "uneven part": data.DataLoader(odd, sampler=distributed(items=odd), batch_size=4),
            "even part of uneven": data.DataLoader(
                odd, sampler=distributed(items=odd, drop_last=True), batch_size=4
            ),
            "all to each": data.DataLoader(
                even, sampler=distributed(num_replicas=1, rank=0, shuffle=False)
            ),
            "a library's part": data.DataLoader(
                even, sampler=Interleaved(dist.get_rank(), dist.get_world_size()), batch_size=2
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
                "length": None if "stream" in name else len(prepared),
            }
        # As in a script without workers, which has nothing to call.
        uncalled = prepare_data_loader(data.DataLoader(odd, sampler=distributed(items=odd)))
        seen["uneven part, uncalled"] = {"epochs": [flat(uncalled), flat(uncalled)]}
        batches = data.BatchSampler(distributed(), batch_size=2, drop_last=False)
        uncalled = prepare_data_loader(data.DataLoader(even, batch_sampler=batches))
        seen["batches of a part, uncalled"] = {"epochs": [flat(uncalled), flat(uncalled)]}
        kept = prepare_data_loader(loaders["processes"])
        names = ["persistent_workers", "prefetch_factor", "num_workers", "batch_size", "in_order"]
        seen["kept"] = {name: getattr(kept, name) for name in names}
        whole = prepare_data_loader(loaders["in order"], add_dist_sampler=False)
        seen["not split"] = {"epochs": two_epochs(whole)}
        whole = prepare_data_loader(loaders["stream"], add_dist_sampler=False)
        seen["stream not split"] = {"epochs": two_epochs(whole)}
        for name, is_divided in {"divided": True, "not divided": False}.items():
            by_process = data.DataLoader(Seeds(), num_workers=1)
            prepared = prepare_data_loader(by_process, add_dist_sampler=is_divided)
            seen[f"seeds, {name}"] = {"epochs": [flat(prepared), flat(prepared)]}
        dropped = []
        options: dict[str, Any]
        for source, options in (
            (even, {}),
            (even, {"shuffle": True}),
            (Unsized(), {"sampler": [*range(EVEN)]}),
            (even, {"sampler": backwards}),
        ):
            loader = data.DataLoader(source, batch_size=7, drop_last=True, **options)
            # What isn't trained on may have no batches.
            assert not len(sharded(loader, device=None, keeps_place=False))
            try:
                dropped.append(len(prepare_data_loader(loader)))
            except ValueError as error:
                dropped.append(str(error))
        miscounted = []
        for kind in (Twice, Sometimes):
            try:
                miscounted.append(flat(prepare_data_loader(kind(even, batch_size=1))))
            except RuntimeError as error:
                miscounted.append(str(error))
        polytrain.report(seen | {"dropped": dropped, "miscounted": miscounted})

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


def test_a_loader_that_would_drop_all_rows_is_refused(ranks: Any) -> None:
    """Otherwise the loop trains nothing, and ends as if it had."""
    for rank in ranks:
        *refused, empty = rank["dropped"]
        # One process has no batch of these six either.
        assert empty == 0
        for message in refused:
            assert "a batch of 7 for each of 2 workers" in message
            assert "no more workers than 1." in message


def test_a_users_loader_stays_of_its_class(ranks: Any) -> None:
    assert epoch(ranks, "own loader") == [[100, 60, 20], [80, 40, 0]]
    for rank in ranks:
        for name, message in zip(("Twice", "Sometimes"), rank["miscounted"], strict=True):
            assert f"{name} doesn't yield one batch for each of its sampler's" in message


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


def test_worker_processes_have_the_seeds_that_their_items_need(ranks: Any) -> None:
    """The same where all ranks read the same items, and others where each has its own."""
    for number in (0, 1):
        first, second = epoch(ranks, "seeds, divided", number)
        assert first == second
        first, second = epoch(ranks, "seeds, not divided", number)
        assert set(first).isdisjoint(second)
    assert epoch(ranks, "seeds, divided", 0) != epoch(ranks, "seeds, divided", 1)


def test_what_is_split_already_is_not_split_again(ranks: Any) -> None:
    assert epoch(ranks, "split already") == [list(range(0, EVEN, 2)), list(range(1, EVEN, 2))]


def parts(rows: int, number: int, **options: Any) -> list[list[int]]:
    """What two ranks get of a `DistributedSampler` in an epoch under plain DDP."""
    samplers = [DistributedSampler(range(rows), 2, rank, **options) for rank in range(2)]
    for sampler in samplers:
        sampler.set_epoch(number)
    return [list(sampler) for sampler in samplers]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("name", "rows", "drop_last"),
    [
        ("batches of a part", EVEN, False),
        ("batches of a part, uncalled", EVEN, False),
        ("uneven part", ODD, False),
        ("uneven part, uncalled", ODD, False),
        ("even part of uneven", ODD, True),
    ],
)
def test_a_distributed_sampler_gives_what_it_gives_under_plain_ddp(
    ranks: Any, name: str, number: int, rows: int, drop_last: bool
) -> None:
    assert epoch(ranks, name, number) == parts(rows, number, drop_last=drop_last)


@pytest.mark.parametrize("number", [0, 1])
def test_samplers_that_know_the_rank_are_not_split_again(ranks: Any, number: int) -> None:
    """Wherever they are, and whoever wrote them."""
    assert epoch(ranks, "a library's part", number) == parts(EVEN, number, shuffle=False)
    assert epoch(ranks, "all to each", number) == [list(range(EVEN))] * 2
    assert epoch(ranks, "groups of a part", number) == [
        [0, 4, 2, 6],
        [1, 5, 3, 7],
    ]


def test_the_length_is_the_number_of_batches(ranks: Any) -> None:
    for rank in ranks:
        found = {name: (r["length"], r["batches"]) for name, r in rank.items() if "batches" in r}
        assert len(found) > 10
        known = {name: each for name, each in found.items() if "stream" not in name}
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


@pytest.mark.parametrize("sampler", ["shuffled", "drawn"])
def test_loaders_that_are_prepared_in_each_epoch_go_on_in_the_middle_of_theirs(
    run: Run, sampler: str
) -> None:
    """Killed in the second epoch: its other rows come next, then all rows of the third."""

    def train() -> None:
        from torch.utils.data import DataLoader, SubsetRandomSampler

        from polytrain_torch import TrainingState, prepare_data_loader

        def loader(rows: int) -> Any:
            items = [*range(rows)]
            options = {"sampler": SubsetRandomSampler(items)} if sampler == "drawn" else {}
            return prepare_data_loader(
                DataLoader(items, batch_size=2, shuffle=not options, **options)
            )

        state = TrainingState()
        done = state.restore()
        for epoch in range(done.get("epoch", 0), 3):
            training = loader(12)
            validation = loader(4)
            rows = []
            for batch in training:
                rows.extend(batch.tolist())
                state.report({"rows": rows, "of": epoch}, epoch=epoch)
                if not done and epoch == 1 and len(rows) == 4:
                    return
            assert len([*validation]) == 2
            pair = [loader(2) for _ in range(2)]
            assert [len([*each]) for each in pair] == [1, 1]

    first = run(train)
    before = {each["of"]: each["rows"] for each in first.history}
    resumed = run(train, restore_from=first.checkpoint)
    after = {each["of"]: each["rows"] for each in resumed.history}
    assert sorted(before[0]) == sorted(before[1] + after[1]) == sorted(after[2]) == [*range(12)]
    assert before[0] != before[1] + after[1] != after[2]


def test_a_data_set_that_grows_is_prepared_again(run: Run) -> None:
    """A loader's epochs are planned when it is prepared."""

    def train() -> None:
        from torch.utils.data import DataLoader

        from polytrain_torch import prepare_data_loader

        items = [*range(4)]

        def prepared() -> Any:
            return prepare_data_loader(DataLoader(items, shuffle=True))

        for rows in (4, 5):
            loader = prepared()
            assert sorted(map(int, loader)) == [*range(rows)]
            items.append(rows)
        with pytest.raises(
            RuntimeError, match=r"has 6 items, and had 5 when .* Prepare the loader"
        ):
            list(loader)

    run(train)


def whole_draw(source: str) -> Any:
    """A sampler that shuffles 13 items with random numbers from this source."""
    import random

    import numpy as np
    from torch.utils.data import Sampler

    class Shuffles(Sampler[int]):
        passes = 0

        def __init__(self) -> None:
            self.own_python = random.Random()
            self.own_numpy = np.random.default_rng()
            self.own_legacy = np.random.RandomState()
            self.own_torch = torch.Generator()
            self.own_torch.seed()
            self.items = [*range(13)]

        def in_place(self) -> list[int]:
            """An order that depends on that of the epoch before."""
            random.shuffle(self.items)
            return self.items

        def __iter__(self) -> Any:
            Shuffles.passes += 1
            shuffled = {
                "python": lambda: random.sample(range(13), 13),
                "in place": self.in_place,
                "in place, made anew": self.in_place,
                "numpy": lambda: np.random.permutation(13),
                "torch": lambda: torch.randperm(13),
                "own python": lambda: self.own_python.sample(range(13), 13),
                "own numpy": lambda: self.own_numpy.permutation(13),
                "own legacy": lambda: self.own_legacy.permutation(13),
                "own torch": lambda: torch.randperm(13, generator=self.own_torch),
            }
            return map(int, shuffled[source]())

        def __len__(self) -> int:
            return 13

    return Shuffles()


@pytest.mark.parametrize(
    "source",
    [
        *("python", "numpy", "torch", "own python", "own numpy", "own legacy", "own torch"),
        *("in place", "in place, made anew"),
    ],
)
def test_a_draw_is_the_same_after_a_restart(run: Run, source: str) -> None:
    """Wherever its random numbers come from, and the training function gets its own.

    Only what depends on the epochs before is drawn again.
    """

    def train() -> None:
        import random

        import numpy as np
        from torch.utils.data import DataLoader

        from polytrain_torch import TrainingState, prepare_data_loader, seed_everything

        state = TrainingState()
        done = state.restore()
        sampler: Any = None
        seed_everything(1)
        expected = [random.random(), np.random.random(), float(torch.rand(()))]
        for epoch in range(done.get("epoch", 0), 3):
            rows: list[int] = []
            if sampler is None or source.endswith("anew"):
                sampler = whole_draw(source) if sampler is None else type(sampler)()
                loader = prepare_data_loader(
                    DataLoader([*range(13)], sampler=sampler, batch_size=2)
                )
            seed_everything(1)
            for batch in loader:
                if not rows and not done:
                    found = [random.random(), np.random.random(), float(torch.rand(()))]
                    assert found == expected
                rows.extend(batch.tolist())
                state.report({"rows": rows, "of": epoch, "passes": sampler.passes}, epoch=epoch)
                if not done and epoch == 1 and len(rows) == 4:
                    return

    first = run(train)
    before = {each["of"]: each["rows"] for each in first.history}
    resumed = run(train, restore_from=first.checkpoint)
    after = {each["of"]: each["rows"] for each in resumed.history}
    assert sorted(before[0]) == sorted(before[1] + after[1]) == sorted(after[2]) == [*range(13)]
    assert before[0] != before[1] + after[1] != after[2]
    assert resumed.metrics["passes"] == (3 if source == "in place" else 2)


def test_a_stream_in_worker_processes_is_seeded_as_the_training_function_is(run: Run) -> None:
    """Otherwise what it draws is the same in every run."""

    def train() -> None:
        from torch.utils.data import DataLoader, IterableDataset

        from polytrain_torch import prepare_data_loader

        class Seeds(IterableDataset[int]):
            def __iter__(self) -> Any:
                yield torch.initial_seed()

        def seeds(of: int) -> list[int]:
            torch.manual_seed(of)
            loader = prepare_data_loader(DataLoader(Seeds(), num_workers=1))
            return [int(seed) for _ in range(2) for seed in loader]

        first, other, again = seeds(1), seeds(2), seeds(1)
        assert first == again
        assert len({*first, *other}) == 4

    run(train)


def test_a_sampler_may_be_endless(run: Run) -> None:
    """It is drawn as far as it is needed, and a restart skips what was given."""

    def train() -> None:
        from itertools import count

        from torch.utils.data import DataLoader

        from polytrain_torch import TrainingState, prepare_data_loader

        class Endless(torch.utils.data.Sampler[int]):
            def __iter__(self) -> Any:
                return count()

        class Items(torch.utils.data.Dataset[int]):
            def __getitem__(self, index: int) -> int:
                return index

            def __len__(self) -> int:
                return 12

        state = TrainingState()
        state.restore()
        loader = prepare_data_loader(DataLoader(Items(), sampler=Endless(), batch_size=500))
        with pytest.raises(TypeError, match=r"Endless has no __len__, so the number of batches"):
            len(loader)
        for given, batch in enumerate(loader, start=1):
            if given == 70:
                state.report({"first": int(batch[0])}, begun=True)
                return

    first = run(train)
    assert first.metrics == {"first": 69 * 500}
    assert run(train, restore_from=first.checkpoint).metrics == {"first": 139 * 500}


def test_a_loader_that_is_not_split_goes_on_at_its_place(run: Run) -> None:
    """As one that a script for several workers has split itself."""

    def train() -> None:
        from torch.utils.data import DataLoader

        from polytrain_torch import TrainingState, prepare_data_loader

        state = TrainingState()
        done = state.restore()
        loader = prepare_data_loader(
            DataLoader([*range(12)], batch_size=2, shuffle=True), add_dist_sampler=False
        )
        for epoch in range(done.get("epoch", 0), 2):
            rows = []
            for batch in loader:
                rows.extend(batch.tolist())
                state.report({"rows": rows, "of": epoch}, epoch=epoch)
                if not done and len(rows) == 4:
                    return

    first = run(train)
    resumed = run(train, restore_from=first.checkpoint)
    epochs = {each["of"]: each["rows"] for each in resumed.history}
    assert sorted(first.metrics["rows"] + epochs[0]) == sorted(epochs[1]) == [*range(12)]


def test_a_checkpoint_before_a_stream_goes_on_keeps_its_place(run: Run) -> None:
    """Two batches, a restart that only saves, and then the rest; after that there is nothing."""

    def train(config: Any) -> None:
        from itertools import islice

        from torch.utils.data import DataLoader, IterableDataset

        from polytrain_torch import TrainingState, prepare_data_loader

        class Counts(IterableDataset[int]):
            first = 0

            def __iter__(self) -> Any:
                for row in range(self.first, 11):
                    self.first = row + 1
                    yield row
                self.first = 0

            def state_dict(self) -> dict[str, int]:
                return {"first": self.first}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.first = state["first"]

        state = TrainingState()
        state.restore()
        batches = iter(prepare_data_loader(DataLoader(Counts(), batch_size=2)))
        rows = [batch.tolist() for batch in islice(batches, config["takes"])]
        state.report({"rows": rows})

    first = run(train, train_loop_config={"takes": 2})
    saves = run(train, train_loop_config={"takes": 0}, restore_from=first.checkpoint)
    rest = run(train, train_loop_config={"takes": 4}, restore_from=saves.checkpoint)
    assert first.metrics["rows"] == [[0, 1], [2, 3]]
    assert rest.metrics["rows"] == [[4, 5], [6, 7], [8, 9], [10]]
    over = run(train, train_loop_config={"takes": 1}, restore_from=rest.checkpoint)
    assert over.metrics["rows"] == []


def test_the_state_of_a_data_set_may_be_an_array() -> None:
    """If a script allows NumPy's types in checkpoints."""
    import numpy as np

    from polytrain_torch.loaders.streams import StatefulRanksPart

    class Counts(torch.utils.data.IterableDataset[int]):
        first = 0

        def __iter__(self) -> Any:
            return iter(range(self.first, 3))

        def state_dict(self) -> Any:
            return np.array([self.first, 3])

        def load_state_dict(self, state: Any) -> None:
            self.first = int(state[0])

    part = StatefulRanksPart(Counts(), rank=0, size=1)
    state: Any = np.array([1, 3])
    part.load_state_dict(state)
    assert [*part] == [1, 2]


def test_a_stream_that_loses_its_place_is_reported_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        from torch.utils.data import DataLoader, IterableDataset

        from polytrain_torch import prepare_data_loader

        class Forgets(IterableDataset[int]):
            def __iter__(self) -> Any:
                return iter(range(4))

        class Remembers(Forgets):
            def state_dict(self) -> dict[str, Any]:
                return {}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                pass

        for dataset in (Forgets(), Forgets(), Remembers()):
            prepare_data_loader(DataLoader(dataset))
        prepare_data_loader(DataLoader(Remembers(), num_workers=1))

    run(train)
    messages = [each.getMessage() for each in caplog.records if "its place" in each.getMessage()]
    assert len(messages) == 2
    assert "Forgets loses its place" in messages[0]
    assert "state_dict and load_state_dict" in messages[0]
    assert "Remembers loses its place" in messages[1]
    assert "num_workers=0" in messages[1]


@pytest.mark.parametrize("own_batches", [False, True])
def test_a_distributed_sampler_goes_on_at_its_place(run: Run, own_batches: bool) -> None:
    """With the rest of its epoch; the next epoch has the next order."""

    def train() -> None:
        from torch.utils.data import BatchSampler, DataLoader

        from polytrain_torch import TrainingState, prepare_data_loader

        class OwnBatches(BatchSampler):
            """Not torch's own class."""

        state = TrainingState()
        done = state.restore()
        sampler = DistributedSampler(range(12))
        if own_batches:
            options: Any = {"batch_sampler": OwnBatches(sampler, 2, drop_last=False)}
        else:
            options = {"sampler": sampler, "batch_size": 2}
        loader = prepare_data_loader(DataLoader([*range(12)], **options))
        for epoch in range(done.get("epoch", 0), 2):
            rows = []
            for batch in loader:
                rows.extend(batch.tolist())
                state.report({"rows": rows, "of": epoch}, epoch=epoch)
                if not done and len(rows) == 4:
                    return

    first = run(train)
    resumed = run(train, restore_from=first.checkpoint)
    epochs = {each["of"]: each["rows"] for each in resumed.history}
    assert first.metrics["rows"] + epochs[0] == alone(0)
    assert epochs[1] == alone(1)


def alone(number: int) -> list[int]:
    """An epoch of a `DistributedSampler` in one process."""
    sampler = DistributedSampler(range(12), 1, 0)
    sampler.set_epoch(number)
    return list(sampler)


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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_over_a_loader_does_not_go_on_after_one_within_it(
    run: Run, num_workers: int
) -> None:
    def train() -> None:
        from torch.utils.data import DataLoader

        import polytrain
        from polytrain_torch import prepare_data_loader

        loader = prepare_data_loader(
            DataLoader([*range(12)], batch_size=2, num_workers=num_workers)
        )
        inner = 0
        try:
            for _ in loader:
                inner += sum(1 for _ in loader)
        except RuntimeError as error:
            polytrain.report({"inner": inner, "message": str(error)})

    metrics = run(train).metrics
    assert metrics["inner"] == 6
    assert "within a loop over the same one" in metrics["message"]
