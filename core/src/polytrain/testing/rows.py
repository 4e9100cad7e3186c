"""Shows that every row is used exactly once per epoch in any backend, whatever faults occur.

Each rank records the rows of every step before it reports that step. In the end those steps count
that led to the final model: of each attempt, the steps up to the start of the next attempt. The
model is a sum over all used rows, which the backend's own collective adds up.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polytrain
from polytrain import Checkpoint
from polytrain.testing.injection import current_injection, sum_over_ranks

EPOCHS = 2
GLOBAL_BATCH = 41


def use_rows(config: Mapping[str, Any]) -> None:
    """The training function.

    Args:
        config: "diary", a directory for the ranks' records, and "all_write", whether every rank
            writes a part of a checkpoint.
    """
    rank = polytrain.get_context().get_world_rank()
    shard = polytrain.get_dataset_shard("train")
    step, sums = 0, [0, 0]
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        state = json.loads((Path(checkpoint.path) / "state-0.json").read_text())
        step, sums = state["step"], state["sums"]
    writes = rank == 0 or config["all_write"]
    name = f"{current_injection().attempt:04d}-{rank}.jsonl"
    with (Path(config["diary"]) / name).open("w") as diary:
        print(json.dumps({"start": step}), file=diary, flush=True)
        while step < EPOCHS * steps_per_epoch(shard.total_rows):
            for batch in shard.iter_batches(global_batch_size=GLOBAL_BATCH):
                rows = batch["x0"].tolist()
                step += 1
                print(json.dumps({"step": step, "rows": rows}), file=diary, flush=True)
                new = sum_over_ranks([len(rows), digest(rows)])
                sums = [before + more for before, more in zip(sums, new, strict=True)]
                with tempfile.TemporaryDirectory() as directory:
                    state = {"step": step, "sums": sums}
                    (Path(directory) / f"state-{rank}.json").write_text(json.dumps(state))
                    mine = Checkpoint.from_directory(directory) if writes else None
                    polytrain.report(state, checkpoint=mine)


def steps_per_epoch(rows: int) -> int:
    """Number of global batches for a number of rows."""
    return -(-rows // GLOBAL_BATCH)


def digest(rows: Iterable[float]) -> int:
    """A number for a set of rows; it changes if a row is missing or comes twice."""
    hashes = (hashlib.sha256(row.hex().encode()).digest() for row in rows)
    # Small, so that every backend can add up all rows.
    return sum(int.from_bytes(hash_[:3], "big") for hash_ in hashes)


def wrong_rows(diary: Path, rows: Sequence[float], model: Mapping[str, Any]) -> list[str]:
    """What is wrong with the rows that a run has used.

    Args:
        diary: the ranks' records.
        rows: all rows of the data set.
        model: the run's final model.
    """
    wrong = []
    steps = steps_that_count(diary)
    per_epoch = steps_per_epoch(len(rows))
    if sorted(steps) != list(range(1, EPOCHS * per_epoch + 1)):
        wrong.append(f"the steps that count are {sorted(steps)}")
    for epoch in range(EPOCHS):
        first = epoch * per_epoch + 1
        used = [row for step in range(first, first + per_epoch) for row in steps.get(step, ())]
        if sorted(used) != sorted(rows):
            twice, left_out = len(used) - len(set(used)), len(set(rows) - set(used))
            wrong.append(f"epoch {epoch}: {twice} rows were used twice, {left_out} left out")
    expected = [EPOCHS * len(rows), EPOCHS * digest(rows)]
    if model["sums"] != expected:
        wrong.append(f"all ranks' sums are {model['sums']} instead of {expected}")
    return wrong


def steps_that_count(diary: Path) -> dict[int, list[float]]:
    """Step → its rows, of all ranks, in the attempt that led to the final model."""
    attempts: dict[str, dict[int, list[float]]] = {}
    starts: dict[str, int] = {}
    for path in sorted(diary.iterdir()):
        attempt = path.name.partition("-")[0]
        # The last line may be incomplete: its step was never reported.
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        for line in lines:
            if "start" in line:
                starts[attempt] = line["start"]
            else:
                attempts.setdefault(attempt, {}).setdefault(line["step"], []).extend(line["rows"])
    counted: dict[int, list[float]] = {}
    for attempt, start in sorted(starts.items()):
        counted = {step: rows for step, rows in counted.items() if step <= start}
        counted |= {s: rows for s, rows in attempts.get(attempt, {}).items() if s > start}
    return counted
