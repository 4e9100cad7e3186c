"""Label selectors: which nodes they allow, which are refused, and what is said of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from polytrain import ScalingConfig
from polytrain.api.cluster_checks import cluster_problems, label_problems
from polytrain.api.config_checks import config_problems
from polytrain.config.configs import RunConfig
from polytrain.policy.labels import NODE_ID, allowed, meets, without

NODES = {
    "a": {NODE_ID: "a", "tier": "small"},
    "b": {NODE_ID: "b", "tier": "large", "zone": "1"},
    "c": {NODE_ID: "c"},
}


# As Ray places a bundle: see the test in tests/e2e/test_nodes.py.
@pytest.mark.parametrize(
    ("selector", "nodes"),
    [
        ({}, "abc"),
        ({"tier": "small"}, "a"),
        ({"tier": "!small"}, "bc"),
        ({"tier": "in(small,large)"}, "ab"),
        ({"tier": "in(small, large)"}, "ab"),
        ({"tier": "!in(small,large)"}, "c"),
        ({"tier": "large", "zone": "1"}, "b"),
        ({"tier": "large", "zone": "2"}, ""),
        ({"tier": "(small)"}, ""),
    ],
)
def test_the_nodes_that_a_selector_allows(selector: dict[str, str], nodes: str) -> None:
    assert {name for name, labels in NODES.items() if meets(labels, selector)} == set(nodes)


def test_nodes_that_meet_one_of_several_selectors() -> None:
    assert allowed(NODES, []) == {"a", "b", "c"}
    assert allowed(NODES, [{"tier": "small"}, {"zone": "1"}]) == {"a", "b"}


@pytest.mark.parametrize(
    ("selector", "avoid", "nodes"),
    [
        ({}, "", "abc"),
        ({}, "ab", "c"),
        ({"tier": "!small"}, "b", "c"),
        ({NODE_ID: "a"}, "b", "a"),
        ({NODE_ID: "in(a,b)"}, "b", "a"),
        ({NODE_ID: "!a"}, "b", "c"),
        ({NODE_ID: "a"}, "a", ""),
    ],
)
def test_nodes_to_avoid_besides_a_selector(
    selector: dict[str, str], avoid: str, nodes: str
) -> None:
    both = without(selector, avoid)
    assert {name for name, labels in NODES.items() if meets(labels, both)} == set(nodes)


TOTALS = {"a": {"CPU": 1.0}, "b": {"CPU": 4.0}, "c": {"CPU": 8.0}}


def test_labels_that_no_node_has_are_named_with_those_that_there_are() -> None:
    scaling = ScalingConfig(label_selector={"tier": "huge"})
    [problem] = label_problems(scaling, TOTALS, NODES)
    assert problem.field == "ScalingConfig.label_selector"
    assert problem.what == (
        "no node of the cluster has labels that meet {'tier': 'huge'}. They have: {'tier': "
        "'small'}; {'tier': 'large', 'zone': '1'}; no labels"
    )


def test_only_nodes_with_the_labels_count() -> None:
    [problem] = label_problems(
        ScalingConfig(num_workers=5, label_selector={"tier": "large"}), TOTALS, NODES
    )
    assert problem.what.startswith(
        "5 workers need nodes with labels that meet {'tier': 'large'}, and those can hold 4: "
    )
    two = ScalingConfig(num_workers=2, label_selector=[{"tier": "small"}, {"tier": "large"}])
    assert list(label_problems(two, TOTALS, NODES)) == []
    both = ScalingConfig(num_workers=2, label_selector=[{"tier": "small"}, {"tier": "small"}])
    assert len(list(label_problems(both, TOTALS, NODES))) == 1
    standby = ScalingConfig(num_workers=4, standby=1, label_selector={"tier": "large"})
    assert len(list(label_problems(standby, TOTALS, NODES))) == 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"label_selector": "spot"}, "label_selector: it is a str"),
        ({"label_selector": {"tier": 1}}, r"\{'tier': 1\} doesn't map names of labels to values"),
        ({"label_selector": {"": "a"}}, "doesn't map names"),
        ({"label_selector": {"tier": ""}}, "doesn't map names"),
        ({"label_selector": ["tier"]}, "'tier' doesn't map names"),
        ({"label_selector": {"a": "b"}, "num_workers": 0}, "num_workers=0 trains in this process"),
        (
            {"label_selector": [{"a": "b"}], "num_workers": 2},
            "it has 1 selector for 2 workers",
        ),
        ({"label_selector": [{"a": "b"}] * 2, "num_workers": (1, 2)}, "elastic run"),
        ({"label_selector": [{"a": "b"}], "standby": 1}, "without standbys"),
    ],
)
def test_a_selector_that_means_nothing_is_refused(options: dict[str, Any], what: str) -> None:
    found = list(config_problems(ScalingConfig(**options), RunConfig()))
    assert any(re.search(what, f"{each.field}: {each.what}. {each.remedy}") for each in found)


@pytest.mark.parametrize(
    "options",
    [
        {"label_selector": {"a": "!in(b,c)"}, "num_workers": (1, 4), "standby": 1},
        {"label_selector": [{"a": "b"}, {}], "num_workers": 2},
        {"label_selector": {}, "num_workers": 0},
    ],
)
def test_a_selector_that_is_right(options: dict[str, Any]) -> None:
    assert list(config_problems(ScalingConfig(**options), RunConfig())) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpus", "GPU"),
        ("gpu", "GPU"),
        ("cpu", "CPU"),
        ("CPUs", "CPU"),
        ("tpu", "TPU"),
        ("TPUs", "TPU"),
        ("hpu", "HPU"),
        ("neuron_core", "neuron_cores"),
        ("NeuronCores", "neuron_cores"),
        ("Memory", "memory"),
    ],
)
def test_a_misspelt_resource_of_rays(name: str, meant: str) -> None:
    scaling = ScalingConfig(resources_per_worker={name: 1})
    [problem] = config_problems(scaling, RunConfig())
    assert problem.field == "ScalingConfig.resources_per_worker"
    assert problem.what == f"Ray has no resource {name!r}"
    assert problem.remedy == f"Write {meant!r}"


@pytest.mark.parametrize("name", ["CPU", "TPU", "HPU", "NPU", "neuron_cores", "memory", "my_disk"])
def test_a_resource_that_is_right(name: str) -> None:
    assert list(config_problems(ScalingConfig(resources_per_worker={name: 1}), RunConfig())) == []


def test_a_resource_close_to_one_of_the_nodes() -> None:
    scaling = ScalingConfig(resources_per_worker={"fast_dsk": 1})
    nodes = [{"CPU": 4.0, "fast_disk": 1.0, "node:10.0.0.1": 1.0}]
    [problem] = cluster_problems(scaling, nodes)
    assert problem.remedy == "Did you mean 'fast_disk'? The nodes have: CPU, fast_disk"
