"""What `make dist` builds: the same bytes anywhere, with a licence and a bill of materials."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NAMES = (
    *("polytrain", "polytrain_plugins", "polytrain_core"),
    *("polytrain_torch", "polytrain_xgboost", "polytrain_lightgbm", "polytrain_tf"),
)


def build(into: Path, umask: int, **environment: str) -> Path:
    subprocess.run(
        [sys.executable, str(ROOT / ".ci/distributions.py"), into.name],
        check=True,
        cwd=into.parent,
        env={**os.environ, **environment},
        umask=umask,
        capture_output=True,
    )
    return into


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"), umask=0o022)


@pytest.fixture
def distributions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that builds them."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("distributions")


def in_wheel(dist: Path, name: str, file: str) -> str:
    [path] = dist.glob(f"{name}-*.whl")
    with zipfile.ZipFile(path) as wheel:
        [found] = [each for each in wheel.namelist() if each.endswith(f".dist-info/{file}")]
        return wheel.read(found).decode()


def metadata(dist: Path, name: str) -> Message:
    return Parser().parsestr(in_wheel(dist, name, "METADATA"))


def bill(dist: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(in_wheel(dist, name, "sboms/sbom.cdx.json"))
    return found


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def test_there_is_an_sdist_and_a_wheel_of_each(dist: Path) -> None:
    assert sorted(digests(dist)) == sorted(
        name
        for each in NAMES
        for name in (f"{each}-{VERSION}.tar.gz", f"{each}-{VERSION}-py3-none-any.whl")
    )


@pytest.mark.sweep
@pytest.mark.only_in_sweep
def test_another_directory_umask_time_zone_and_order_of_sets_give_the_same_bytes(
    dist: Path, tmp_path: Path
) -> None:
    other = build(tmp_path / "other", umask=0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="7", LC_ALL="C")
    assert digests(other) == digests(dist)


@pytest.mark.parametrize("name", NAMES)
def test_none_names_a_place_on_this_machine(dist: Path, name: str) -> None:
    needed = metadata(dist, name).get_all("Requires-Dist", [])
    assert [each for each in needed if "file:" in each] == []
    ours = [Requirement(each) for each in needed if each.startswith("polytrain")]
    assert {str(each.specifier) for each in ours} <= {f"=={VERSION}"}


@pytest.mark.parametrize("name", NAMES)
def test_the_bill_has_what_the_metadata_asks_for_with_licences(dist: Path, name: str) -> None:
    text = json.dumps(found := bill(dist, name))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert found["metadata"]["component"]["version"] == VERSION
    components = found.get("components", [])
    assert all(each["licenses"] for each in components)
    needed = {Requirement(each).name for each in metadata(dist, name).get_all("Requires-Dist", [])}
    packages = {each["name"] for each in components if each["purl"].startswith("pkg:pypi/")}
    assert packages == needed


def test_the_bill_has_what_others_wrote_inside_a_distribution(dist: Path) -> None:
    named = {
        (each["name"], each["version"])
        for each in bill(dist, "polytrain_core")["components"]
        if "version" in each
    }
    vendored = ROOT / "core/src/polytrain/view/page/assets/vendor"
    found = {
        match.groups()
        for path in vendored.iterdir()
        if (match := re.match(r"(\w+)-([\d.]+)\.", path.name.lower()))
    }
    assert named == found


def test_they_install_and_start_without_an_index(dist: Path, tmp_path: Path) -> None:
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target"]
    wheels = [str(path) for path in dist.glob("*.whl")]
    subprocess.run([sys.executable, "-m", "pip", *install, str(tmp_path), *wheels], check=True)
    script = "import polytrain; print(*polytrain.backend_names(), polytrain.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{tmp_path}/polytrain/__init__.py" in run.stdout
    assert {"torch", "xgboost", "lightgbm", "tensorflow"} <= {*run.stdout.split()}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["mine.py", "notes.ipynb"], "unexpected ['notes.ipynb']"),
        (["mine.py"], "missing ['polytrain/py.typed'"),
        (["polytrain/py.typed"], "'licenses/LICENSE'"),
    ],
)
def test_a_wheel_with_other_files_is_refused(
    distributions: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(distributions, "allowed", lambda: ["mine.py", "polytrain/py.typed"])
    path = tmp_path / "polytrain-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in files:
            wheel.writestr(file, "")
    with pytest.raises(distributions.UnexpectedContents, match=re.escape(said)):
        distributions.check(path, ["polytrain/py.typed"])
