"""Takes the picture in docs/see-a-run.md: of a run that lost a worker process. Needs Chromium.

Beside the picture it writes the SHA-256 of what draws this part of a page, by which a test sees
that the picture is of today's page. With an argument, both are written into that directory.
"""

from __future__ import annotations

import hashlib
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

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PICTURE = "report.png"
DRAWN_BY = "report.sha256"

ASSETS = Path("core/src/polytrain/view/page/assets")
SHOWN = (
    "axis.js",
    "base.html",
    "controls.html",
    "metrics.html",
    "page.css",
    "page.html",
    "page.js",
)
"""What draws the part that the picture has."""

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


def drawn_by() -> str:
    """Return the SHA-256 of each file that draws what the picture has, as sha256sum prints it."""
    digests = ((ASSETS / name, (ROOT / ASSETS / name).read_bytes()) for name in SHOWN)
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in digests)


def main(images: Path) -> int:
    """Take the picture, and write it and what it was drawn by into a directory."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print("Install Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    # The ranks sleep: they share what CPUs there are.
    os.environ.setdefault("POLYTRAIN_LOCAL_CPUS", "4")
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
        images.mkdir(exist_ok=True)
        picture = images / PICTURE
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={SIZE}",
                f"--screenshot={picture}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    (images / DRAWN_BY).write_text(drawn_by())
    print(f"{picture} is written ({picture.stat().st_size / 1000:.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES))
