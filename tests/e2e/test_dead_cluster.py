"""A Ray cluster that died without a goodbye doesn't keep the next run waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SCRIPT = """
import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

result = make_trainer(
    "reference",
    lambda: polytrain.report({"step": 1}),
    scaling_config=ScalingConfig(num_workers=1, cluster="ray"),
    run_config=RunConfig(storage_path="runs", progress=False),
).fit()
print(result.metrics)
"""


def test_a_run_starts_its_own_ray_where_the_last_one_is_dead(tmp_path: Path) -> None:
    # Paths of Ray's sockets must be short. Its last processes may write there until they end.
    with TemporaryDirectory(prefix="pt-", dir="/tmp", ignore_cleanup_errors=True) as home:
        address = Path(home, "ray", "ray_current_cluster")
        address.parent.mkdir()
        # Nobody listens on the port of `tcpmux`.
        address.write_text("127.0.0.1:1")
        inherited = {name: value for name, value in os.environ.items() if name[:4] != "RAY_"}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=tmp_path,
            env={**inherited, "RAY_TMPDIR": home},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "{'step': 1}\n"
    assert "127.0.0.1:1" in run.stderr
    assert "starts its own Ray" in run.stderr
