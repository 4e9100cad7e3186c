"""A user's own use of Ray: `fit()` in an actor, which may be killed; Ray in a training function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_worker_process import run
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import Checkpoint, RunConfig, ScalingConfig, ValidationConfig, make_trainer
from polytrain.testing.processes import eventually

pytestmark = pytest.mark.on_ray


class Tuner:
    """A user's actor."""

    def fit(self, directory: str, num_workers: int | tuple[int, int], *, waits: bool) -> int:
        """Run with half of the cluster, to the end, with a validation, or for ever."""

        model = Path(directory, "model")
        model.mkdir()
        (model / "weights").touch()

        def train() -> None:
            checkpoint = None if waits else Checkpoint.from_directory(str(model))
            polytrain.report({"step": 1}, checkpoint=checkpoint, validation=not waits)
            Path(directory, f"rank-{polytrain.get_context().get_world_rank()}").touch()
            if waits:
                import threading

                threading.Event().wait()

        trainer = make_trainer(
            "reference",
            train,
            scaling_config=ScalingConfig(num_workers=num_workers, cluster="ray"),
            validation_config=ValidationConfig(fn=lambda _: {"score": 1.0}),
            run_config=RunConfig(storage_path=directory, name="run", progress=False),
        )
        return len(trainer.fit().history)


def tuner(**options: Any) -> Any:
    import ray

    return ray.remote(num_cpus=0)(Tuner).options(**options).remote()


def is_all_free() -> bool:
    """Whether nobody has anything of Ray's, and no actor is left."""
    import ray
    from ray._private.state import actors

    groups = ray.util.placement_group_table().values()
    return (
        ray.available_resources().get("CPU") == 4.0
        and all(group["state"] == "REMOVED" for group in groups)
        and all(actor["State"] == "DEAD" for actor in actors().values())
    )


def hosts() -> int:
    """The hosts of agents that live."""
    from ray._private.state import actors

    alive = [actor["ActorClassName"] for actor in actors().values() if actor["State"] == "ALIVE"]
    return alive.count("RayHost")


@pytest.mark.sweep
@pytest.mark.parametrize("num_workers", [only_in_sweep(2), (2, 3)])
def test_a_run_whose_actor_is_killed_leaves_nothing_reserved(
    tmp_path: Path, num_workers: int | tuple[int, int]
) -> None:
    """Ray keeps an actor's placement groups until the whole job ends. Elastic runs have several."""
    import ray

    actor = tuner()
    actor.fit.remote(str(tmp_path), num_workers, waits=True)
    assert eventually(lambda: (tmp_path / "rank-1").exists(), seconds=60)
    assert hosts() == 1
    ray.kill(actor)
    assert eventually(is_all_free, seconds=30)


def test_a_run_that_ends_in_an_actor_leaves_nothing(tmp_path: Path) -> None:
    """The actor is like a trial of Ray Tune, whose tasks Ray places in the trial's own group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 1}])
    actor = tuner(
        num_cpus=1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_capture_child_tasks=True
        ),
    )
    assert ray.get(actor.fit.remote(str(tmp_path), 2, waits=False)) == 1
    ray.kill(actor)
    ray.util.remove_placement_group(group)
    assert eventually(is_all_free, seconds=30)


def ask_ray() -> None:
    import json

    import ray

    ray.init(log_to_driver=False, logging_level=40)
    print(json.dumps(ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote())))


def test_ray_is_reachable(quiet: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    """The same cluster, with whatever CPUs the workers leave."""
    assert run(ask_ray, quiet, capfd) == [42, 42]


def test_threads_on_ray_are_as_many_as_the_cpus_of_a_worker(quiet: RunConfig) -> None:
    """Ray sets the variable too, in its own processes."""
    result = make_trainer(
        "reference",
        lambda: os.environ["OMP_NUM_THREADS"],
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}),
        run_config=quiet,
    ).fit()
    assert result.return_values == ("2", "2")
