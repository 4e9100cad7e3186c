"""A run of ours in two parts, and the same without a break: what it costs to go on.

Run as a script, it is both. Ray is up before, and stays the same.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from booster_parties import LOGICAL_CPUS, MODEL_FILES, PARAMS, WORKERS

PART = 0.9
"""Of the rounds, before the break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Seconds."""

    whole: float
    """A whole `fit()`, without a break."""

    whole_first: float
    """Of that, until its first round was done."""

    last_rounds: float
    """And the rounds after the break in the other."""

    resumed: float
    """The `fit()` that resumes from the checkpoint, until its model is there."""

    resumed_first: float
    """Of that, until its first round was done."""


@dataclass(slots=True, kw_only=True)
class _Fit:
    """A run as it is seen from outside. Times are seconds since it was begun."""

    rounds: dict[int, float] = field(default_factory=dict)
    """When each of its rounds was reported."""

    took: float = 0.0
    checkpoint: Any = None
    model: bytes = b""


def measure(task: dict[str, Any]) -> Resumed:
    """Train in two parts, then without a break. Ray must be up."""
    from harness import settle

    rounds = task["rounds"]
    before = max(1, min(rounds - 1, round(PART * rounds)))
    begun = _fit(task, before)
    settle()
    resumed = _fit(task, rounds, start=begun.checkpoint)
    settle()
    whole = _fit(task, rounds)
    # What is quick because it has lost rounds, or ends in another model, would be no achievement.
    assert list(resumed.rounds) == list(range(before + 1, rounds + 1))
    assert resumed.model == whole.model
    return Resumed(
        whole=whole.took,
        whole_first=whole.rounds[1],
        last_rounds=whole.rounds[rounds] - whole.rounds[before],
        resumed=resumed.took,
        resumed_first=resumed.rounds[before + 1],
    )


def _fit(task: dict[str, Any], rounds: int, *, start: Any = None) -> _Fit:
    """One run."""
    from polytrain import RunConfig, ScalingConfig, make_trainer
    from polytrain_plugins import hookimpl

    fit = _Fit()

    class Observer:
        @hookimpl
        def polytrain_reported(self, report: Any) -> None:
            fit.rounds[report.step] = time.perf_counter() - begun

    begun = time.perf_counter()
    result = make_trainer(
        task["backend"],
        params=dict(PARAMS[task["backend"]]),
        num_boost_round=rounds,
        label=task["label"],
        eval_train=False,
        datasets={"train": task["data"]},
        restore_from=start,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            storage_path=Path(task["directory"], "runs"), observers=(Observer(),), progress=False
        ),
    ).fit()
    fit.took = time.perf_counter() - begun
    assert result.checkpoint is not None
    fit.checkpoint = result.checkpoint
    fit.model = Path(result.checkpoint.path, MODEL_FILES[task["backend"]]).read_bytes()
    return fit


def main() -> None:
    """Do what the command line says, and tell it in `result.json` of the task's directory."""
    from harness import running_ray

    task = json.loads(sys.argv[1])
    with running_ray(num_cpus=LOGICAL_CPUS):
        found = measure(task)
    Path(task["directory"], "result.json").write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
