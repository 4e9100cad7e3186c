"""Builds all distributions into a directory, and checks what is in them.

python .ci/distributions.py dist

They are built from the files that git tracks, as these are in the checkout. The time in them is
that of the last commit, so who builds the same commit with the same tools gets the same bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import hatchling.build
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from sbom import licences, sbom

ROOT = Path(__file__).parents[1]
MEMBERS = ("plugins", "core", "plugin_torch", "plugin_xgboost", "plugin_lightgbm", "plugin_tf")

UMBRELLA = ("pyproject.toml", "README.md", ".ci/hatch_metadata.py")
"""What the distribution `polytrain` is built from."""

ALLOWED = ROOT / ".ci" / "distribution_files.txt"
SBOM = "sbom.cdx.json"


class UnexpectedContents(Exception):
    """A distribution has files that it shouldn't have, or lacks some."""


def build(into: Path) -> list[Path]:
    """Build and check everything."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", _git("log", "-1", "--format=%ct").strip())
    into = into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    built: list[Path] = []
    for folder in ("", *MEMBERS):
        with tempfile.TemporaryDirectory() as work:
            source = Path(work, "source")
            files = [file for file in UMBRELLA if not folder] or _tracked(folder)
            _stage(ROOT / folder, files, source)
            sdist = into / _run_hook("build_sdist", source, into)
            # Debian's Python 3.11.2 has no filters of `tarfile`.
            subprocess.run(["tar", "--extract", "--file", sdist], cwd=work, check=True)
            unpacked = Path(work, sdist.name.removesuffix(".tar.gz"))
            wheel = into / _run_hook("build_wheel", unpacked, into)
        check(sdist, files)
        check(wheel, [file.removeprefix("src/") for file in files if file.startswith("src/")])
        built += [sdist, wheel]
    return built


def check(distribution: Path, required: Iterable[str]) -> None:
    """Compare a distribution's files with the patterns that are allowed, and with those it needs.

    Raises:
        UnexpectedContents: a file fits no pattern, or one is missing.
    """
    names = contents(distribution)
    unexpected = [name for name in names if not any(fnmatchcase(name, each) for each in allowed())]
    licence = "LICENSE" if distribution.suffix == ".gz" else "licenses/LICENSE"
    described = SBOM if distribution.suffix == ".gz" else f"sboms/{SBOM}"
    missing = [
        *(file for file in required if file not in names),
        *(part for part in (licence, described) if not any(name.endswith(part) for name in names)),
    ]
    if unexpected or missing:
        raise UnexpectedContents(
            f"{distribution.name}: unexpected {unexpected}, missing {missing}. What may be in a "
            f"distribution stands in {ALLOWED.relative_to(ROOT)}."
        )


def contents(distribution: Path) -> list[str]:
    """The names of its files, without the directory that an sdist has them in."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            return wheel.namelist()
    with tarfile.open(distribution) as sdist:
        return [name.partition("/")[2] for name in sdist.getnames()]


def allowed() -> list[str]:
    """The patterns of names of files that a distribution may have."""
    lines = ALLOWED.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _stage(folder: Path, files: Iterable[str], to: Path) -> None:
    """Copy the files, and add the licence and a bill of materials, which only a release has."""
    for file in files:
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file, to / file)
    shutil.copyfile(ROOT / "LICENSE", to / "LICENSE")
    project = to / "pyproject.toml"
    wheel = "[tool.hatch.build.targets.wheel]\n"
    text = project.read_text()
    assert wheel in text, project
    project.write_text(text.replace(wheel, f'{wheel}sbom-files = ["{SBOM}"]\n'))
    document = sbom(
        ProjectMetadata(str(to), PluginManager()).core,
        licences(ROOT / "docs" / "dependencies.md"),
        datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.UTC),
    )
    (to / SBOM).write_text(document)


def _run_hook(hook: str, source: Path, into: Path) -> str:
    """Call a hook of the build backend, which works in the current directory."""
    with contextlib.chdir(source):
        name: str = getattr(hatchling.build, hook)(str(into))
    return name


def _tracked(folder: str) -> list[str]:
    """The files of a folder that git tracks."""
    return _git("-C", folder, "ls-files", "-z").rstrip("\0").split("\0")


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return run.stdout


if __name__ == "__main__":
    for path in build(Path(sys.argv[1])):
        print(f"{path.stat().st_size:9,} bytes  {path}")
