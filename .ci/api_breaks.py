"""Says which public names break since the last release.

python .ci/api_breaks.py

A release is a tag such as v1.2.3. Public is what the reference has. A break is allowed if the
first part of the version that isn't 0 is another one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import griffe
from reference_page import GROUPS, PACKAGES, public_members

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Compare with the last release, if there is one."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tag = last_release(ROOT)
    if tag is None:
        print("There is no release yet to compare public names with.")
        return 0
    archive = subprocess.run(["git", "archive", tag], cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as released:
        # Debian's Python 3.11.2 has no filters of `tarfile`.
        subprocess.run(["tar", "--extract"], cwd=released, check=True, input=archive.stdout)
        broken = list(breaks(Path(released), ROOT))
    print(*broken, f"{len(broken)} breaks of public names since {tag}.", sep="\n")
    return int(bool(broken) and compatible(tag.removeprefix("v"), version))


def last_release(checkout: Path) -> str | None:
    """The tag of the last release before the checkout's commit, which may be one itself."""
    describe = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^"]
    found = subprocess.run(describe, cwd=checkout, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def breaks(old: Path, new: Path) -> Iterator[str]:
    """Yield what breaks for users of the public names of one checkout who get another one."""
    before, after = packages(old), packages(new)
    public = {
        path
        for module in {module for group in GROUPS for module in group.modules}
        if (found := member(before, module)) is not None
        for name, target in public_members(found)
        for path in (f"{module}.{name}", target.path)
    }
    for name, package in before.items():
        for each in griffe.find_breaking_changes(package, after[name]):
            path = each.obj.path
            if path in public or any(path.startswith(f"{parent}.") for parent in public):
                values = [
                    str(value) for value in (each.old_value, each.new_value) if value is not None
                ]
                yield f"{path}: {each.kind.value}: {' -> '.join(values)}"


def compatible(old: str, new: str) -> bool:
    """Whether a user may expect one version to do what another one does."""
    first, second = (
        tuple(part.split(".")[: 2 if part.startswith("0.") else 1]) for part in (old, new)
    )
    return first == second


def packages(checkout: Path) -> dict[str, griffe.Module]:
    """All packages in a checkout."""
    sources = {name: checkout / folder / "src" for name, folder in PACKAGES.items()}
    there = {name: source for name, source in sources.items() if (source / name).is_dir()}
    loader = griffe.GriffeLoader(search_paths=list(there.values()))
    loaded = {name: loader.load(name) for name in there}
    loader.resolve_aliases(implicit=True, external=False)
    return {name: found for name, found in loaded.items() if isinstance(found, griffe.Module)}


def member(loaded: dict[str, griffe.Module], path: str) -> griffe.Module | None:
    """The module of this path, if it is there."""
    package, _, inner = path.partition(".")
    found = loaded.get(package)
    for part in filter(None, inner.split(".")):
        found = found.modules.get(part) if found is not None else None
    return found


if __name__ == "__main__":
    sys.exit(main())
