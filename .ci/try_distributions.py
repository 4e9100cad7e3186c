"""Installs the built distributions as a user would, and runs them, without a network.

python .ci/try_distributions.py dist

Every Python from 3.11 to 3.13 that is on this machine gets an environment of its own. What the
distributions ask for is downloaded first, into build/. Tree boosters are tried: torch and
TensorFlow would be gigabytes for each Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
ASKED_FOR = "polytrain[xgboost-cpu,lightgbm]"
EXAMPLES = ("xgboost_tabular.py", "lightgbm_ranking.py")

WITH_LOOPBACK = """
import fcntl, os, socket, struct, sys
IFF_UP, SIOCSIFFLAGS = 1, 0x8914
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command where there is only a loopback device. Workers talk through it."""


def main(dist: Path) -> int:
    """Try all Pythons, and say which were left out."""
    namespace = _network_namespace() if shutil.which("unshare") else []
    if not namespace:
        print("This user may not make a network namespace: pip alone goes without a network.")
    tried = 0
    for version in PYTHONS:
        python = _interpreter(version)
        if python is None:
            print(f"Python {version} isn't on this machine: left out.")
            continue
        _try(python, version, dist.resolve(), namespace)
        print(f"Python {version}: installed {ASKED_FOR} and ran {', '.join(EXAMPLES)}.")
        tried += 1
    return 0 if tried else 1


def _interpreter(version: str) -> str | None:
    """A Python of this version: that of the search path, or one of pyenv's."""
    of_pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for python in (shutil.which(f"python{version}"), *map(str, sorted(of_pyenv))):
        # pyenv has commands for versions that it hasn't activated: these fail.
        if python and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
            return python
    return None


def _try(python: str, version: str, dist: Path, namespace: list[str]) -> None:
    wheels = ROOT / "build" / f"wheels-{version}"
    pip = [python, "-m", "pip"]
    locally = ["--quiet", "--no-index", "--find-links", str(wheels), "--find-links", str(dist)]
    download = ["--quiet", "--only-binary=:all:", "--find-links", str(dist), "-d", str(wheels)]
    with tempfile.TemporaryDirectory() as work:
        _run([*pip, "download", *download, ASKED_FOR], work)
        # Those of an earlier build, which have the same version.
        for stale in wheels.glob("polytrain*"):
            stale.unlink()
        _run([python, "-m", "venv", "--without-pip", "env"], work)
        installed = f"{work}/env/bin"
        install = [*pip, "--python", f"{installed}/python", "install", *locally]
        _run([*namespace, *install, "--no-compile", ASKED_FOR], work)
        doctor = [f"{installed}/polytrain", "doctor", "--storage", f"{work}/runs"]
        _run([*namespace, *doctor], work)
        for example in EXAMPLES:
            shutil.copy(ROOT / "examples" / example, work)
            _run([*namespace, f"{installed}/python", example], work)


def _network_namespace() -> list[str]:
    """The words before a command that take its network away, or nothing if that isn't allowed."""
    for unshare in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        words = [*unshare, sys.executable, "-c", WITH_LOOPBACK]
        if not subprocess.run([*words, "true"], capture_output=True).returncode:
            return words
    return []


def _run(command: list[str], directory: str) -> None:
    """Run a command outside of the checkout, and show what it printed if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        command,
        cwd=directory,
        env=kept | {"POLYTRAIN_LOCAL_CPUS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        sys.exit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
