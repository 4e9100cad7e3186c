"""Which versions a process has, which of them differ from the driver's, and how that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain.workers.agents.node_checks import (
    installed_versions,
    other_versions,
    versions_unlike,
    warnings_of_versions,
)

DRIVER = {"python": "3.12.1", "torch": "2.13.0+cpu", "polytrain-core": "0.1.0"}


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution of version 2.0.1."""
    metadata = tmp_path / "oldframe-2.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: oldframe\nVersion: 2.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "oldframe"


def test_another_version_here_is_named_with_the_drivers(framework: str) -> None:
    driver = {**installed_versions([framework, "pytest"]), framework: "2.13.0"}
    assert versions_unlike(driver) == ("oldframe 2.0.1 (driver: 2.13.0)",)
    driver["another"] = "1.0"
    assert versions_unlike(driver) == (
        "another missing (driver: 1.0)",
        "oldframe 2.0.1 (driver: 2.13.0)",
    )


def test_nothing_differs_if_nothing_is_to_be_compared() -> None:
    assert versions_unlike({}) == ()
    assert versions_unlike(installed_versions(["pytest"])) == ()


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
