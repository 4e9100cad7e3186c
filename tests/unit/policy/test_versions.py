"""Which versions on a node differ from the driver's, and how that is said."""

from __future__ import annotations

from polytrain.policy.versions import other_versions, warnings_of_versions

DRIVER = {"python": "3.12.1", "torch": "2.13.0+cpu", "polytrain-core": "0.1.0"}


def test_both_versions_are_named_and_builds_are_no_versions() -> None:
    node = {"python": "3.12.1", "torch": "2.0.1", "polytrain-core": "0.1.0"}
    assert other_versions(node, DRIVER) == ("torch 2.0.1 (driver: 2.13.0+cpu)",)
    assert other_versions({**DRIVER, "torch": "2.13.0+cu126"}, DRIVER) == ()


def test_what_a_node_lacks_differs() -> None:
    node = {"python": "3.12.1", "polytrain-core": "0.1.0"}
    assert other_versions(node, DRIVER) == ("torch missing (driver: 2.13.0+cpu)",)


def test_nodes_that_differ_alike_share_a_warning() -> None:
    old, older = ("torch 2.0.1 (driver: 2.13.0)",), ("torch 1.9 (driver: 2.13.0)",)
    found = warnings_of_versions(
        {"10.77.0.3": old, "10.77.0.1": (), "10.77.0.2": old, "10.77.0.4": older}
    )
    assert len(found) == 2
    assert "10.77.0.2, 10.77.0.3: torch 2.0.1 (driver: 2.13.0)" in found[0]
    assert "10.77.0.4: torch 1.9 (driver: 2.13.0)" in found[1]
