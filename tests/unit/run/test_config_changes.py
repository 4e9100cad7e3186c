"""What `on_rollback` makes of a request, also where the run is resumed."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from typing import Any

import pytest

from polytrain import FailureConfig, Rollback, RunConfig
from polytrain.backends.reference import Reference
from polytrain.config.run_spec import RunSpec
from polytrain.run.config_changes import ConfigChanges, OnRollbackError


def halved(config: dict[str, Any], rollback: Rollback) -> dict[str, Any]:
    return {"rate": config["rate"] / 2}


def train(config: dict[str, Any]) -> None:
    pass


SPEC = RunSpec(
    backend=Reference(),
    train_loop_per_worker=train,
    train_loop_config={"rate": 8.0},
    run_config=RunConfig(
        failure_config=FailureConfig(on_divergence="rollback", on_rollback=halved)
    ),
)
BARE = Rollback(attempt=0, rank=0, step=6, good_step=5, reason="loss is nan")


def test_a_function_that_exits_does_not_end_the_drivers_program() -> None:
    changes = ConfigChanges(spec=SPEC, function=lambda config, rollback: sys.exit(0))
    with pytest.raises(OnRollbackError, match=r"^FailureConfig\.on_rollback: SystemExit: 0$"):
        changes.after([BARE])


def test_a_rollback_that_left_batches_out_has_changed_no_configuration() -> None:
    """The run is resumed with `on_rollback`, which it didn't have then."""
    changes = ConfigChanges(spec=SPEC, function=halved)
    without = replace(BARE, skipped={"train": ((0, 1, 2),)})
    assert changes.after([without]) is None
    changed = changes.after([without, BARE])
    assert changed is not None
    assert pickle.loads(changed) == {"train_loop_config": {"rate": 4.0}}
