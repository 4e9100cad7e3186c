"""A rank's shard without a run, for tests of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polytrain.config.configs import DataConfig
from polytrain.config.mix import Mix
from polytrain.data.fingerprint import digests
from polytrain.data.read.describe import Source, describe
from polytrain.data.read.mix import describe_mix
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.opening import open_shards
from polytrain.data.shards.rows_shard import RowsShard
from polytrain.data.shards.spec import Held
from polytrain_plugins import InvalidJobError


def shard_of(
    data: Any,
    *,
    world_size: int = 1,
    rank: int = 0,
    shards: int | None = None,
    as_tables: bool = False,
    virtual_workers: int | None = None,
    whole: bool = False,
    position: Mapping[str, Any] | None = None,
    skipped: Sequence[tuple[int, int, int]] = (),
    **config: Any,
) -> RowsShard:
    """The shard "train" of one rank, made as agents and worker processes make it.

    Args:
        data: as in `datasets={"train": data}`.
        world_size: number of ranks.
        rank: this rank.
        shards: number of canonical shards, if the run has them already, or by the user's choice.
        as_tables: as for a backend whose demand is `reads_tables`.
        virtual_workers: number of virtual workers that the ranks stand for, if there are any.
        whole: whether every rank gets all rows.
        position: where to resume, as in a manifest; by default at the start.
        skipped: what the run leaves out; see `Rollback.skipped`.
        config: fields of `DataConfig`, except `group`.
    """
    wanted = DataConfig(**config)
    source: Source | None
    if isinstance(data, Mix):
        source, wrong = describe_mix("train", data, wanted)
        if source is None:
            raise InvalidJobError(tuple(wrong))
    else:
        source = describe(
            "train",
            data,
            columns=wanted.columns,
            transform=wanted.transform,
            pack=wanted.pack,
        )
    dataset = RunDataset(source=source, config=wanted, digests=digests(source))
    spec = dataset.spec(
        world_size=world_size,
        shards=shards,
        whole=whole,
        as_tables=as_tables,
        only_tables=False,
        virtual_workers=virtual_workers,
    )
    holds = spec.held is not Held.NOTHING
    tables = [dataset.held_rows(spec, world_size, rank).read()] if holds else []
    positions = {} if position is None else {"train": position}
    opened = open_shards(
        [spec],
        iter(tables),
        positions,
        skipped={"train": skipped},
        world_size=world_size,
        rank=rank,
    )["train"]
    assert isinstance(opened, RowsShard)
    return opened
