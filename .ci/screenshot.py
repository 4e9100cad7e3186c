"""Takes the picture in docs/report.md: of a run that lost a worker process. Needs Chromium."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, make_trainer

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "report.png"

SIZE = "1000,645"


def train() -> None:
    saved, context = polytrain.get_checkpoint(), polytrain.get_context()
    done = 0 if saved is None else int((Path(saved.path) / "step").read_text())
    chance = random.Random(context.get_attempt())
    for step in range(done + 1, 301):
        time.sleep(0.02)
        loss = 0.3 + math.exp(-step / 60) + 0.03 * chance.random()
        metrics = {"loss": loss, "eval": {"accuracy": 1 - loss / 2}, "learning_rate": 0.1 / step}
        with tempfile.TemporaryDirectory() as directory:
            kept = None
            if step % 75 == 0 and context.get_world_rank() == 0:
                (Path(directory) / "step").write_text(str(step))
                kept = Checkpoint.from_directory(directory)
            polytrain.report(metrics, checkpoint=kept)
        if (step, context.get_world_rank(), context.get_attempt()) == (190, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print("Install Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        result = make_trainer(
            "reference",
            train,
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(
                name="higgs",
                storage_path=directory,
                failure_config=FailureConfig(max_failures=1),
            ),
        ).fit()
        page = result.report(Path(directory) / "run.html")
        PICTURE.parent.mkdir(exist_ok=True)
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={SIZE}",
                f"--screenshot={PICTURE}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    print(f"{PICTURE} is written ({PICTURE.stat().st_size / 1000:.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
