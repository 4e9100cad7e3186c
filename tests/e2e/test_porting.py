"""The pages about porting: what a diff shows runs before under its origin, and after on polytrain.

Both give the same numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.porting import diffs_of, files_of, printed

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


def test_a_script_of_torchrun_runs_unchanged_and_as_a_function(tmp_path: Path) -> None:
    files = files_of("torchrun.md")
    before, after = diffs_of("torchrun.md")["train.py"]
    assert before == files["train.py"]
    for name, text in (*files.items(), ("ported.py", after)):
        (tmp_path / name).write_text(text)
    expected = printed(tmp_path, [*TORCHRUN, "train.py", "--epochs=3"])
    assert expected["loss"] < 0.01
    assert printed(tmp_path, ["launch.py"]) == pytest.approx(expected, rel=1e-5)
    assert printed(tmp_path, ["ported.py"]) == pytest.approx(expected, rel=1e-3)
