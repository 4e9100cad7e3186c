"""A directory with other files is left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain import InvalidJobError, RunConfig, make_trainer


def nothing() -> None:
    pass


def test_directory_that_is_no_run(quiet: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "higgs").mkdir()
    (tmp_path / "higgs" / "precious").write_text("data")
    run = RunConfig(name="higgs", storage_path=tmp_path)
    with pytest.raises(InvalidJobError, match="exists already"):
        make_trainer("reference", nothing, run_config=run)
    assert (tmp_path / "higgs" / "precious").read_text() == "data"
