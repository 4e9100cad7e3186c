"""Which versions of the driver's distributions a process has."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain.workers.agents.installed import installed_versions, versions_unlike


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
