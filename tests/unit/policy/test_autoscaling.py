"""What Ray's two autoscalers report, and what it means for a run."""

from __future__ import annotations

from typing import Any

import pytest

from polytrain.policy.autoscaling import (
    AutoscalerDemand,
    AutoscalerReport,
    only_we_use,
    outlook,
    report_of_v1,
    report_of_v2,
)

NOTHING = AutoscalerDemand(groups={})


def status(**report: Any) -> dict[str, Any]:
    """What the first autoscaler writes into Ray's table."""
    return {
        "monitor_pid": 15884,
        "autoscaler_report": {
            "active_nodes": {"ray.head.default": 1},
            "idle_nodes": None,
            "pending_nodes": [],
            "pending_launches": {},
            "failed_nodes": [],
            "node_availability_summary": {"node_availabilities": {}},
            **report,
        },
    }


def test_a_cluster_that_is_only_mirrored_adds_no_nodes() -> None:
    report = report_of_v1(status(active_nodes={"node_302b3982dc50c0ec": 1}))
    assert report == AutoscalerReport(adds_nodes=False)
    assert outlook(report, NOTHING).says == "no autoscaler adds nodes to it"
    assert outlook(None, AutoscalerDemand(groups={"a": 2})).says == "no autoscaler adds nodes to it"


def test_the_first_autoscaler_names_what_it_starts_and_what_failed() -> None:
    report = report_of_v1(
        status(
            pending_launches={"gpu": 2},
            pending_nodes=[["10.0.0.7", "gpu", "setting-up"], ["10.0.0.8", "cpu", "waiting"]],
            failed_nodes=[["10.0.0.9", "cpu"]],
            node_availability_summary={
                "node_availabilities": {
                    "spot": {
                        "is_available": False,
                        "unavailable_node_information": {
                            "category": "InsufficientInstanceCapacity",
                            "description": "there is no capacity in this zone",
                        },
                    },
                    "cpu": {"is_available": True, "unavailable_node_information": None},
                }
            },
        )
    )
    assert report.adds_nodes
    assert report.starting == {"gpu": 3, "cpu": 1}
    assert report.failures == (
        "spot: there is no capacity in this zone",
        "cpu: a node has failed",
    )
    assert outlook(report, NOTHING).says == (
        "its autoscaler has been asked for them, and is starting nodes (1 cpu, 3 gpu); it has "
        "failed to start some (spot: there is no capacity in this zone; cpu: a node has failed)"
    )


STATE: dict[str, Any] = {
    "autoscaler_state_version": "4",
    "pending_instance_requests": [{"ray_node_type_name": "cpu", "count": 2}],
    "pending_instances": [{"ray_node_type_name": "cpu", "instance_id": "71e9b7de"}],
    "failed_instance_requests": [
        {"ray_node_type_name": "gpu", "count": 1, "reason": "quota exceeded"}
    ],
    "infeasible_gang_resource_requests": [{"details": "1e75e25672a7:PACK|PENDING"}],
}


def test_the_second_autoscaler_names_what_it_cannot_hold() -> None:
    report = report_of_v2(STATE)
    assert report.adds_nodes
    assert report.starting == {"cpu": 3}
    assert report.failures == ("gpu: quota exceeded",)
    assert report.infeasible == {"1e75e25672a7"}
    assert report_of_v2({"autoscaler_state_version": "1"}) == AutoscalerReport(adds_nodes=True)


def test_a_demand_is_refused_once_nothing_is_being_started() -> None:
    """What is on its way may change the autoscaler's mind."""
    own = AutoscalerDemand(groups={"1e75e25672a7": 3, "other": 1})
    assert outlook(report_of_v2(STATE), own).refused == 0
    idle = {**STATE, "pending_instance_requests": [], "pending_instances": []}
    assert outlook(report_of_v2(idle), own).refused == 3
    assert "has no nodes to add that could hold them" in outlook(report_of_v2(idle), own).says
    assert outlook(report_of_v2(idle), AutoscalerDemand(groups={"other": 1})).refused == 0


def test_actors_without_a_group_are_refused_by_what_they_ask_for() -> None:
    asked = {"CPU": 1.0, "GPU": 2.0}
    report = report_of_v2(
        {
            "autoscaler_state_version": "4",
            "infeasible_resource_requests": [
                {"resources_bundle": asked},
                {"resources_bundle": asked},
                {"resources_bundle": {"CPU": 64.0}},
            ],
        }
    )
    resources = {**asked, "memory": 0.0}
    assert outlook(report, AutoscalerDemand(groups={}, actors=3, resources=resources)).refused == 2
    assert outlook(report, AutoscalerDemand(groups={}, actors=1, resources=resources)).refused == 1
    # They may be another job's.
    assert not outlook(report, AutoscalerDemand(groups={}, actors=1, resources=asked)).is_certain
    other = outlook(report, AutoscalerDemand(groups={}, actors=1, resources={"CPU": 1.0}))
    assert (other.refused, other.is_certain) == (0, True)


@pytest.mark.parametrize(
    ("free", "agents", "only_we"),
    [
        ({"a": {"CPU": 4.0}, "b": {"CPU": 2.0}}, [], True),
        ({"a": {"CPU": 2.0}, "b": {"CPU": 2.0}}, ["a"], True),
        ({"a": {"CPU": 2.0}, "b": {"CPU": 2.0}}, ["b"], False),
        ({"a": {"CPU": 3.9}, "b": {"CPU": 2.0}}, [], False),
        # Ray leaves out what is used up.
        ({"a": {"CPU": 4.0}, "b": {}}, ["b"], True),
        ({"a": {"CPU": 4.0}}, [], False),
    ],
)
def test_who_uses_the_nodes(free: Any, agents: list[str], *, only_we: bool) -> None:
    totals = {"a": {"CPU": 4.0, "GPU": 1.0}, "b": {"CPU": 2.0}}
    assert only_we_use(totals, free, agents, {"CPU": 2.0, "GPU": 0.0}) == only_we
