"""Which versions a run writes down."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain.run.resume import versions_of
from polytrain_plugins import load_backend


@pytest.mark.parametrize("distribution", ["framework", "framework-cpu"])
def test_the_build_of_a_framework_without_gpus_counts_as_the_framework(
    distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / f"{distribution.replace('-', '_')}-9.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    backend = load_backend("reference")()
    monkeypatch.setattr(type(backend), "requires", {"framework": "pip install framework"})
    assert versions_of(backend)["framework"] == "9.1"
