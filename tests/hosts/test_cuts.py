"""Hosts that are cut off one after another: the run is as if nothing had happened.

`make bench-cuts` does the same a hundred times, at random.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hosts.cuts import Cut, Plan, cluster, run


@pytest.mark.only_in_sweep
@pytest.mark.timeout(900)
def test_three_cuts_change_nothing(tmp_path: Path) -> None:
    """One that is too short to be a failure, one that is healed, and one that isn't."""
    cuts = (
        Cut(hit="rank 1", after_s=0.3, with_standby=True, healed_after_s=1),
        Cut(hit="rank 0", after_s=0.7, with_standby=True, healed_after_s=9),
        Cut(hit="rank 1", after_s=0.2, with_standby=True, healed_after_s=None),
    )
    plan = Plan(backend="torch", driver_has_rank=False, cuts=cuts)
    with cluster(tmp_path) as found:
        outcome = run(found, plan, tmp_path / "run")
    assert outcome.wrong == []
    assert [parts is not None for parts in outcome.parts] == [False, True, True]


@pytest.mark.only_in_sweep
@pytest.mark.timeout(900)
def test_the_drivers_host_is_cut_off_with_the_standby_or_a_rank(tmp_path: Path) -> None:
    """All other hosts are silent to the driver, which uses them again once they answer."""
    cut = Cut(hit="driver", after_s=0.5, with_standby=True, healed_after_s=12)
    plan = Plan(backend="reference", driver_has_rank=True, cuts=(cut, cut))
    with cluster(tmp_path) as found:
        outcome = run(found, plan, tmp_path / "run")
    assert outcome.wrong == []
