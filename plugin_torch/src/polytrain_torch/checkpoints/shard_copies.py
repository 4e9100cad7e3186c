"""A rank's own part of a training state, which it writes without the other ranks.

Nobody has compared the ranks, or knows where all shards are: whoever reads the parts finds out.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

from polytrain_torch.checkpoints.rank_parts import (
    CHANGES,
    States,
    comparable,
    digests_of,
    file_of,
)
from polytrain_torch.checkpoints.rank_states import own_rank_state, write_rank_state
from polytrain_torch.checkpoints.safe_serialization import refuse_unsafe, save_safely
from polytrain_torch.checkpoints.sharded import METADATA_FILE, data_file, metadata_file
from polytrain_torch.checkpoints.sharded_parts import ShardedParts, beside_shards, is_sharded
from polytrain_torch.checkpoints.state_files import UNKNOWN, digests_file, write_state
from polytrain_torch.models.parallel import unwrapped


def write_replica(
    directory: Path, whole: States, may_differ: States, *, changes: Collection[str]
) -> None:
    """Write this rank's part of a state of which all ranks have the same weights.

    Rank 0's has everything, that of another rank what it may have alone.

    Args:
        directory: an empty directory.
        whole: this rank's states of all parts, and its progress.
        may_differ: what of them may differ between ranks.
        changes: names of the parts of which that is less than the whole.

    Raises:
        TypeError: a value isn't plain data, and couldn't be loaded safely.
    """
    rank = dist.get_rank()
    write_rank_state(directory, rank, own_rank_state())
    save_safely(digests_of(may_differ), directory / digests_file(rank))
    if rank:
        save_safely({**may_differ, CHANGES: [*changes]}, directory / file_of(rank))
        return
    found = {"ranks": dist.get_world_size(), "names": UNKNOWN}
    write_state(directory, whole["parts"], progress=whole["progress"], found=found)


def write_part(directory: Path, parts: Mapping[str, Any], *, progress: Mapping[str, Any]) -> None:
    """Write this rank's part of a sharded state to an empty directory. It waits for no other rank.

    Raises:
        TypeError: a value isn't plain data, and couldn't be loaded safely.
    """
    rank, sharded = dist.get_rank(), ShardedParts(parts)
    names = [name for name, part in parts.items() if is_sharded(part)]
    whole = {
        name: unwrapped(part).state_dict() for name, part in parts.items() if name not in names
    }
    own: dict[str, dict[str, Any]] = {
        "parts": whole,
        "beside": {
            name: beside_shards(parts[name])
            for name in names
            if isinstance(parts[name], torch.nn.Module)
        },
        "progress": dict(progress),
    }
    _write_shards({name: sharded.state(name) for name in names}, directory, rank)
    write_rank_state(directory, rank, own_rank_state())
    compared = {name: comparable(parts[name], state) for name, state in whole.items()}
    digests = digests_of({**own, "parts": compared})
    save_safely(digests, directory / digests_file(rank))
    if rank:
        save_safely(own, directory / file_of(rank))
        return
    found = {"ranks": dist.get_world_size(), "names": UNKNOWN}
    beside = own["beside"]
    write_state(directory, whole, progress=progress, found=found, sharded=names, beside=beside)


def _write_shards(states: Mapping[str, Any], directory: Path, rank: int) -> None:
    refuse_unsafe(states)
    with warnings.catch_warnings():
        # torch takes it for the only process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            dict(states),
            # The system writes a copy to a disk when it likes.
            storage_writer=dcp.FileSystemWriter(directory, sync_files=False),
            planner=_PartPlanner(),
            no_dist=True,
        )
    (directory / METADATA_FILE).rename(directory / metadata_file(rank))
    (directory / data_file(0)).rename(directory / data_file(rank))


class _PartPlanner(dcp.DefaultSavePlanner):
    """torch's planner, which refuses a plan without the other ranks' shards."""

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=dict(all_plans[0].planner_data))

    def finish_plan(self, new_plan: Any) -> Any:
        self.plan = new_plan
        return new_plan
