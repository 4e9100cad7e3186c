"""What only the cluster can tell, told before any worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from polytrain import InvalidJobError, RunConfig, ScalingConfig, TrainingFailedError, make_trainer


def nothing() -> None:
    pass


@pytest.mark.on_ray
def test_more_workers_than_the_cluster_holds(quiet: RunConfig) -> None:
    with pytest.raises(InvalidJobError) as caught:
        make_trainer(
            "reference", nothing, scaling_config=ScalingConfig(num_workers=5), run_config=quiet
        )
    [problem] = caught.value.problems
    assert problem.field == "ScalingConfig.num_workers"
    assert "1 node (4 CPU)" in problem.what
    assert problem.remedy == "Use num_workers=4"
    assert ray.util.placement_group_table() == {} or all(
        group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
    )


@pytest.mark.on_ray
def test_resource_that_the_cluster_lacks(quiet: RunConfig) -> None:
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"unobtainium": 1})
    with pytest.raises(InvalidJobError, match="0 unobtainium"):
        make_trainer("reference", nothing, scaling_config=scaling, run_config=quiet)


def test_directory_that_is_no_run(quiet: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "higgs").mkdir()
    (tmp_path / "higgs" / "precious").write_text("data")
    run = RunConfig(name="higgs", storage_path=tmp_path)
    with pytest.raises(InvalidJobError, match="exists already"):
        make_trainer("reference", nothing, run_config=run)
    assert (tmp_path / "higgs" / "precious").read_text() == "data"


@pytest.mark.on_ray
def test_start_that_takes_too_long(quiet: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    """The cluster could hold the workers, but somebody else has the CPUs."""
    taken = ray.util.placement_group([{"CPU": 3}])
    ray.get(taken.ready())
    try:
        scaling = ScalingConfig(num_workers=2, start_timeout_s=0.5)
        with pytest.raises(TrainingFailedError, match=r"could not be placed within 0\.5 s"):
            make_trainer("reference", nothing, scaling_config=scaling, run_config=quiet).fit()
    finally:
        ray.util.remove_placement_group(taken)
    assert "2 workers of 1 CPU each; the cluster has" in caplog.text
