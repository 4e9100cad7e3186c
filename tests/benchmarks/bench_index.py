"""How long a new driver takes to find the newest checkpoint of ten thousand."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness import OURS, Bound, Figure, conclude, parse, take_turns

from polytrain.checkpoint.manifest import AttemptId, Manifest
from polytrain.checkpoint.store import CheckpointStore
from polytrain.storage.location import Location

_CHECKPOINTS = 10_000
_TWO_SECONDS = Bound(factor=2.0)


def make_index(directory: Path, count: int) -> None:
    """Commit checkpoints of one small file each."""
    store = CheckpointStore(location=Location.of(directory))
    for number in range(count):
        attempt_id = AttemptId(token=1, attempt=number // 1000)
        staged = directory / "made" / str(number)
        staged.mkdir(parents=True)
        (staged / "model").write_bytes(os.urandom(64))
        manifest = Manifest(
            number=number,
            attempt_id=attempt_id,
            step=number,
            metrics={"loss": 1 / (number + 1)},
            backend="torch",
            written_by="rank_0",
            versions={},
            created="",
            world_size=2,
            positions={},
            files=(),
        )
        files = store.store_part(manifest.directory, 0, staged, {}).files
        store.commit(replace(manifest, files=files))


def find(directory: Path) -> float:
    """Seconds until the index is read and its newest checkpoint verified."""
    store = CheckpointStore(location=Location.of(directory))
    begun = time.perf_counter()
    found = store.find(since_token=0)
    assert not store.damage(found.manifests[-1])
    taken = time.perf_counter() - begun
    assert not found.damaged
    return taken


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=5)
    count = 100 if options.quick else _CHECKPOINTS
    with tempfile.TemporaryDirectory() as directory:
        make_index(Path(directory), count)
        parties = {OURS: partial(find, Path(directory))}
        taken = take_turns(parties, repetitions=options.repetitions, what="index")
    bounds = [] if options.quick else [_TWO_SECONDS]
    figure = Figure(what=f"{count} checkpoints", samples=taken, bounds=bounds)
    return conclude("the index of a run's checkpoints, on this machine's disk", [figure])


if __name__ == "__main__":
    sys.exit(main())
