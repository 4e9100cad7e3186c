"""Entry points of what is installed now, though metadata is read once."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from polytrain_plugins.installed import installed_entry_points

GROUP = "polytrain.tests"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for packages that was there when the program began."""
    monkeypatch.syspath_prepend(tmp_path)
    assert names() == []
    return tmp_path


def names() -> list[str]:
    return sorted(each.name for each in installed_entry_points(GROUP))


def install(site: Path, name: str) -> Path:
    """Install a distribution as pip does: all its files, then under its name."""
    unpacked = site.parent / f"{site.name}-{name}"
    unpacked.mkdir()
    (unpacked / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (unpacked / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = module\n")
    return unpacked.rename(site / f"{name}-1.2.dist-info")


def test_what_is_installed_or_removed_later_is_noticed(site: Path) -> None:
    first = install(site, "first")
    assert names() == ["first"]
    install(site, "second")
    assert names() == ["first", "second"]
    shutil.rmtree(first)
    assert names() == ["second"]


def test_metadata_is_not_read_again_for_the_next_run(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "first")
    assert names() == ["first"]
    reads = []
    monkeypatch.setattr(
        importlib.metadata.PathDistribution, "read_text", lambda self, name: reads.append(name)
    )
    assert names() == ["first"]
    assert not reads
