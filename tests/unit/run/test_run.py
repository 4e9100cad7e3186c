"""The parts of a run, before its driver begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polytrain.backends.reference import Reference
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.configs import ScalingConfig
from polytrain.config.run_spec import RunSpec
from polytrain.data.checks import described
from polytrain.data.shards.spec import ShardSpec
from polytrain.record.history import RunHistory
from polytrain.run.run import Run
from polytrain.storage.location import Location
from polytrain_plugins import Demand


def test_data_in_which_batches_are_left_out_stay_divided(tmp_path: Path) -> None:
    """Nobody has a checkpoint with the division, and places in another one are other rows."""
    (tmp_path / "rows.csv").write_text("x\n" + "1\n" * 8)
    datasets, problems = described(
        {"train": str(tmp_path / "rows.csv")}, {}, needs_train=False, num_workers=4
    )
    assert not problems
    unused: Any = None

    def shards(**start: Any) -> int:
        run = Run(
            spec=RunSpec(backend=Reference(), scaling_config=ScalingConfig(num_workers=4)),
            datasets=datasets,
            demand=Demand(),
            cluster=None,
            choice=None,
            location=Location.of(tmp_path),
            identity={},
            lease=unused,
            past=RunHistory(divided_for=2),
            manager=unused,
            start=StartingPoint(**start),
        )
        [spec] = run.shard_specs
        assert isinstance(spec, ShardSpec)
        return spec.plan.shards

    assert (shards(), shards(skipped={"train": [(0, 2, 4)]})) == (4, 2)
