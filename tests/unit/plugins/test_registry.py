"""Finding backends by name: from metadata alone, and imported only when asked for.

Distributions are made up: a folder with metadata and a module, put on `sys.path`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polytrain_plugins import (
    AmbiguousBackendError,
    BackendImportError,
    ContractVersionError,
    RegistryError,
    UnknownBackendError,
    backend_names,
    load_backend,
)
from polytrain_plugins.installed import install_command

Install = Callable[..., None]

MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from polytrain_plugins import Backend, Capabilities, hookimpl

@dataclass(frozen=True, kw_only=True)
class Made(Backend):
    name: ClassVar[str] = {name!r}
    contract_version: ClassVar[int] = {version}
    capabilities: ClassVar[Capabilities] = Capabilities()

    def engine(self):
        raise NotImplementedError

@hookimpl
def polytrain_backends():
    return [Made]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a made-up distribution that provides one backend."""

    def install(
        distribution: str,
        name: str,
        *,
        module: str = "",
        source: str | None = None,
        attribute: str = "",
    ) -> None:
        module = module or f"module_of_{distribution.replace('-', '_')}"
        site = tmp_path / distribution
        info = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n"
        )
        (info / "entry_points.txt").write_text(
            f"[polytrain.backends]\n{name} = {module}{attribute}\n"
        )
        code = MODULE.format(name=name, version=1) if source is None else source
        (site / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_an_installed_backend_is_found_and_loaded(install: Install) -> None:
    install("polytrain-made", "made")
    assert "made" in backend_names()
    loaded = load_backend("made")
    assert loaded.name == "made"
    assert loaded.__module__ == "module_of_polytrain_made"


def test_first_party_backends_come_through_the_same_door() -> None:
    assert {"lightgbm", "reference", "tensorflow", "torch", "xgboost"} <= set(backend_names())
    assert list(backend_names()) == sorted(backend_names())


def test_listing_names_imports_none_of_them(install: Install) -> None:
    install("polytrain-bomb", "bomb", source="raise SystemExit('imported')")
    assert "bomb" in backend_names()
    assert "module_of_polytrain_bomb" not in sys.modules


def test_loading_one_imports_no_other(install: Install) -> None:
    install("polytrain-bomb", "bomb", source="raise SystemExit('imported')")
    install("polytrain-made", "made")
    load_backend("made")
    assert "module_of_polytrain_bomb" not in sys.modules


def test_names_are_listed_without_importing_any_backend() -> None:
    script = (
        "import sys, polytrain_plugins as p; before = {*sys.modules}; p.backend_names(); "
        "print([n for n in {*sys.modules} - before if n.startswith('polytrain')])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_an_unknown_name_gets_the_nearest_and_the_list(install: Install) -> None:
    install("polytrain-made", "catboost")
    with pytest.raises(UnknownBackendError) as caught:
        load_backend("catbost")
    message = str(caught.value)
    assert "No backend is named 'catbost'" in message
    assert "Did you mean 'catboost'?" in message
    assert "Install it" not in message
    assert ", ".join(backend_names()) in message


def test_a_name_far_from_all_others_gets_the_list_alone() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        load_backend("zzzzzz")
    assert "Did you mean" not in str(caught.value)
    assert "xgboost" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("torch", "torch"), ("tensorflow", "tf")],
)
@pytest.mark.parametrize("typed", ["exactly", "nearly"])
def test_a_backend_of_ours_that_is_not_installed_has_its_install_line(
    name: str, extra: str, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polytrain_plugins.registry.installed_entry_points", lambda group: ())
    with pytest.raises(UnknownBackendError) as caught:
        load_backend(name if typed == "exactly" else name[:-1])
    assert install_command(f"pip install 'polytrain[{extra}]'") in str(caught.value)
    assert "Installed: none" in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == (typed == "nearly")


def test_two_distributions_that_claim_one_name_are_both_named(install: Install) -> None:
    install("polytrain-one", "made")
    install("polytrain-other", "made")
    assert backend_names().count("made") == 1
    with pytest.raises(AmbiguousBackendError) as caught:
        load_backend("made")
    assert "polytrain-one 1.2" in str(caught.value)
    assert "polytrain-other 1.2" in str(caught.value)
    assert "Uninstall all but one" in str(caught.value)


def test_one_distribution_that_is_found_twice_is_one(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install and the checkout it points to."""
    install("polytrain-made", "made")
    copy = tmp_path / "checkout"
    copy.mkdir()
    for path in (tmp_path / "polytrain-made").glob("*.dist-info"):
        (copy / path.name).symlink_to(path)
    monkeypatch.syspath_prepend(copy)
    assert load_backend("made").name == "made"


def test_an_import_that_fails_keeps_its_cause_and_says_how_to_install(install: Install) -> None:
    install("polytrain-made", "made", source="import framework_of_nobody")
    with pytest.raises(BackendImportError) as caught:
        load_backend("made")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "framework_of_nobody"
    message = str(caught.value)
    assert "ModuleNotFoundError: No module named 'framework_of_nobody'" in message
    assert "polytrain-made 1.2" in message
    assert "pip install polytrain-made" in message


def test_an_import_that_ends_the_program_is_an_import_that_fails(install: Install) -> None:
    """It may be any installed backend's, that is only looked at for its options."""
    install("polytrain-made", "made", source="raise SystemExit('no licence')")
    with pytest.raises(BackendImportError, match="SystemExit: no licence"):
        load_backend("made")


def test_a_module_that_is_not_there_is_an_import_that_fails(
    install: Install, tmp_path: Path
) -> None:
    install("polytrain-made", "made")
    (tmp_path / "polytrain-made" / "module_of_polytrain_made.py").unlink()
    with pytest.raises(BackendImportError, match="module_of_polytrain_made"):
        load_backend("made")


@pytest.mark.parametrize("version", [0, 2, None])
def test_another_version_of_the_contract_is_refused(install: Install, version: int | None) -> None:
    install("polytrain-made", "made", source=MODULE.format(name="made", version=version))
    with pytest.raises(ContractVersionError) as caught:
        load_backend("made")
    assert f"version {version} of the backend contract; this is version 1" in str(caught.value)
    assert "polytrain-made 1.2" in str(caught.value)
    assert "--upgrade" in str(caught.value)


def test_a_module_that_provides_another_name_is_reported_which(install: Install) -> None:
    install("polytrain-made", "made", source=MODULE.format(name="mode", version=1))
    with pytest.raises(RegistryError) as caught:
        load_backend("made")
    message = str(caught.value)
    assert "'module_of_polytrain_made', whose polytrain_backends() provides 'mode'" in message
    assert "`name` is 'made'" in message


def test_a_module_that_provides_nothing_is_reported_so(install: Install) -> None:
    install("polytrain-made", "made", source="")
    with pytest.raises(RegistryError, match=r"polytrain_backends\(\) provides none"):
        load_backend("made")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def polytrain_backends", "def polytrain_backend", "unknown hook 'polytrain_backend'"),
        ("@hookimpl", "", "provides none (mark it with @hookimpl, and return a list)"),
        ("return [Made]", "return None", "provides none (mark it with @hookimpl, and return a"),
        ("return [Made]", "return Made", "'ABCMeta' object is not iterable"),
        ("return [Made]", "raise OSError('no licence')", "OSError: no licence"),
        ("return [Made]", "return [Made()]", "provides a Made, which is no class"),
        ("@dataclass(frozen=True, kw_only=True)", "", "put @dataclass(frozen=True, kw_only=True)"),
        ("= Capabilities()", "= {}", "a dict as its `capabilities`, not a Capabilities"),
        ("= Capabilities()", "= Capabilities(); requires = ['x']", "a list as its `requires`, not"),
        (": ClassVar[int] = 1", " = '1'", "for version '1' of the backend contract; this is ver"),
    ],
)
def test_a_mistake_in_a_module_is_named(install: Install, old: str, new: str, message: str) -> None:
    source = MODULE.format(name="made", version=1)
    assert old in source
    install("polytrain-made", "made", source=source.replace(old, new))
    with pytest.raises(RegistryError, match=re.escape(message)):
        load_backend("made")


def test_an_entry_point_that_names_a_class_is_refused(install: Install) -> None:
    source = MODULE.format(name="made", version=1)
    install("polytrain-made", "made", source=source, attribute=":Made")
    with pytest.raises(RegistryError, match="'module_of_polytrain_made:Made'"):
        load_backend("made")
