"""Which devices the installed torch is built for, from its files alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polytrain_plugins import Job
from polytrain_torch import Torch

TEXT = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = {version!r}
debug = False
cuda: Optional[str] = {cuda!r}
git_version = '0'
hip: Optional[str] = {hip!r}
"""

CPU = TEXT.format(version="9.1.0+cpu", cuda=None, hip=None)
BUILDS = {
    "cpu": (CPU, True),
    "cpu, without types": (CPU.replace(": Optional[str]", ""), True),
    "cuda": (TEXT.format(version="9.1.0", cuda="13.0", hip=None), False),
    "rocm": (TEXT.format(version="9.1.0+rocm9", cuda=None, hip="9.0"), False),
    "unknown": ("__version__ = '9.1.0'", False),
    "none": (None, False),
}
SENTENCE = "it is True, and torch 9.1.0+cpu in this environment is built for CPUs only"


def job(*, use_gpu: bool = True, is_in_this_environment: bool = True) -> Job:
    return Job(
        num_workers=2,
        use_gpu=use_gpu,
        cpus_per_worker=1,
        has_training_function=True,
        datasets={},
        is_in_this_environment=is_in_this_environment,
    )


def install(path: Path, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a torch first on the path; an import of it fails."""
    package = path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('torch is imported')")
    if text is not None:
        (package / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(path)


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_for_cpus_is_reported_without_an_import(
    build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, is_warned = BUILDS[build]
    install(tmp_path, text, monkeypatch)
    messages = [problem.what for problem in Torch().problems(job())]
    assert messages == ([SENTENCE] if is_warned else [])


def test_a_build_for_cpus_is_fine_without_gpus_and_for_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, CPU, monkeypatch)
    assert list(Torch().problems(job(use_gpu=False))) == []
    assert list(Torch().problems(job(is_in_this_environment=False))) == []
