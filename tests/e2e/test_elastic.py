"""The number of workers follows the resources; what is lost is replaced by what stands by."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from tests.e2e import test_virtual_workers
from tests.e2e.journals import journal
from tests.e2e.test_exactly_once import (
    ROWS,
    Diary,
    assert_exactly_once,
    train,
    with_torch,
    with_xgboost,
)
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    FailureConfig,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.testing.processes import eventually, title
from polytrain_plugins import Report, hookimpl

pytestmark = pytest.mark.on_ray


class At:
    """An observer that does something when rank 0 reports a step for the first time."""

    def __init__(self, step: int, do: Any) -> None:
        self._step, self._do = step, do

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        if report.step == self._step and self._do is not None:
            do, self._do = self._do, None
            do()


@pytest.fixture(autouse=True)
def _everything_is_free() -> None:
    """What an earlier run has left is free once Ray's nodes have reported it; a run takes what is.

    Its agents are gone: those of the next run may be in older processes, which were idle.
    """
    total = ray.cluster_resources()["CPU"]
    assert eventually(lambda: not agents() and ray.available_resources().get("CPU") == total)


def kill_an_agent() -> None:
    agents()[-1].kill()


def agents() -> list[psutil.Process]:
    """The agents of this process's runs, the oldest first."""
    below = psutil.Process().children(recursive=True)
    found = [process for process in below if "ray::RayHost" in title(process)]
    return sorted(found, key=lambda process: process.create_time())


def progress_pages(pid: int | str) -> set[int]:
    """Inodes of the pages that a process shares: an agent shares one with each of its ranks.

    There are none of a process that has ended, such as an agent of a test beside this one.
    """
    maps: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in maps if "polytrain-progress" in line}


def fit(
    path: Path,
    scaling: ScalingConfig,
    *,
    observers: tuple[Any, ...] = (),
    waits: dict[int, int] | None = None,
    waits_in_size: dict[int, int] | None = None,
    max_failures: int = 0,
    backend: str = "torch",
    function: Any = train,
) -> Result:
    (path / "diary").mkdir()
    config = {
        "diary": str(path / "diary"),
        "waits": waits or {},
        "waits_in_size": waits_in_size or {},
        "run": "",
        "kills": {},
        "add_up": {"torch": with_torch, "xgboost": with_xgboost}[backend],
    }
    return make_trainer(
        backend,
        function,
        train_loop_config=config,
        datasets={"train": {"id": list(range(ROWS))}},
        scaling_config=scaling,
        run_config=RunConfig(
            storage_path=path,
            name="run",
            progress=False,
            failure_config=FailureConfig(max_failures=max_failures),
            observers=observers,
        ),
    ).fit()


def sizes(path: Path) -> list[int]:
    """World size of every attempt, as the journal has it."""
    return [line["world_size"] for line in journal(path / "run", "Launched")]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "backend",
    # In `make test`, torch grows in the test of virtual workers.
    [only_in_sweep("torch"), "xgboost"],
)
def test_a_run_begins_with_what_there_is_and_grows_when_there_is_more(
    tmp_path: Path, backend: str
) -> None:
    taken = ray.util.placement_group([{"CPU": 2}])
    ray.get(taken.ready())
    # What an earlier run has left is free once Ray's nodes have reported it.
    assert eventually(lambda: ray.available_resources().get("CPU") == 2)
    result = fit(
        tmp_path,
        ScalingConfig(num_workers=(1, 4)),
        observers=(At(3, lambda: ray.util.remove_placement_group(taken)),),
        waits_in_size={2: 7, 3: 15},
        backend=backend,
    )
    assert sizes(tmp_path)[0] == 2
    assert sizes(tmp_path)[-1] == 4
    assert result.error is None
    assert_exactly_once(Diary(tmp_path / "diary"), result)
    # No failure was allowed, and none was charged: nothing was done twice either.
    launched = journal(tmp_path / "run", "Launched")
    assert launched[1]["step"] == 7


def test_virtual_workers_of_a_run_that_grows_end_in_the_same_bits(tmp_path: Path) -> None:
    whole = test_virtual_workers.fit(tmp_path / "whole", 1)
    taken = ray.util.placement_group([{"CPU": 3}])
    ray.get(taken.ready())
    assert eventually(lambda: ray.available_resources().get("CPU") == 1)
    grown = test_virtual_workers.fit(
        tmp_path / "grown",
        (1, 4),
        cluster="ray",
        waits={1: 4, 2: 6, 3: 8},
        observers=(At(2, lambda: ray.util.remove_placement_group(taken)),),
    )
    found = sizes(tmp_path / "grown")
    assert (found[0], found[-1]) == (1, 4)
    assert grown.history == whole.history
    weights = whole.load_model()
    assert all(value.equal(weights[name]) for name, value in grown.load_model().items())


def test_a_lost_host_is_replaced_with_all_of_its_agents(tmp_path: Path) -> None:
    result = fit(
        tmp_path,
        ScalingConfig(num_workers=(1, 3)),
        observers=(At(4, kill_an_agent),),
        waits={0: 12},
        max_failures=1,
    )
    assert sizes(tmp_path) == [3, 3]
    assert_exactly_once(Diary(tmp_path / "diary"), result)


def name_agent_and_train(config: Any) -> None:
    """Writes which agent each rank of each attempt belongs to, and trains."""
    context = polytrain.get_context()
    pages = progress_pages("self")
    hosts = [each for each in psutil.process_iter() if "ray::RayHost" in title(each)]
    [agent] = [each for each in hosts if pages & progress_pages(each.pid)]
    name = f"agent-{context.get_attempt()}-{context.get_world_rank()}"
    Path(config["diary"]).with_name(name).write_text(str(agent.pid))
    train(config)


def test_a_standby_takes_the_place_of_a_rank_of_a_lost_host(tmp_path: Path) -> None:
    standbys: list[int] = []

    def kill_the_agent_of_the_ranks() -> None:
        assert eventually(lambda: len(agents()) == 2)
        of_standby, of_ranks = sorted(agents(), key=lambda each: len(progress_pages(each.pid)))
        assert len(progress_pages(of_ranks.pid)) == 2
        standbys.append(of_standby.pid)
        of_ranks.kill()

    result = fit(
        tmp_path,
        ScalingConfig(num_workers=2, standby=1),
        function=name_agent_and_train,
        observers=(At(4, kill_the_agent_of_the_ranks),),
        # However long Ray takes to start the standby, the first attempt is there to be killed.
        waits={0: 12},
        max_failures=1,
    )
    agents_of_ranks = {int(path.read_text()) for path in tmp_path.glob("agent-1-*")}
    assert sizes(tmp_path) == [2, 2]
    assert set(standbys) & agents_of_ranks
    assert_exactly_once(Diary(tmp_path / "diary"), result)
    [ended] = journal(tmp_path / "run", "AttemptEnded")
    assert ended["failure"]["kind"] == "AGENT_LOST"


def test_a_run_that_can_never_have_its_least_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"5 is more than the cluster can hold"):
        fit(tmp_path, ScalingConfig(num_workers=(5, 8)))


def test_standbys_that_can_never_be_had_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"ScalingConfig.standby.*Use standby=2"):
        fit(tmp_path, ScalingConfig(num_workers=2, standby=3))


def nothing() -> None:
    pass


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


def test_resource_that_the_cluster_lacks(quiet: RunConfig) -> None:
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"unobtainium": 1})
    with pytest.raises(InvalidJobError, match="0 unobtainium"):
        make_trainer("reference", nothing, scaling_config=scaling, run_config=quiet)


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
