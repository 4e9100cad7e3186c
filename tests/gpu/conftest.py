"""Tests that need one NVIDIA GPU. Elsewhere they are skipped, before anything is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polytrain.linux.machine_resources import visible_gpus

_FIGURES: list[tuple[str, str]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests without a device file: torch takes seconds to import."""
    if visible_gpus(os.environ):
        return
    here = Path(__file__).parent
    skipped = pytest.mark.skip(reason="needs a CUDA GPU: this machine has no /dev/nvidia0")
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(skipped)


@pytest.fixture(scope="session", autouse=True)
def torch_with_cuda() -> None:
    import torch

    if torch.version.cuda is None:
        pytest.skip(f"needs a torch with CUDA: {torch.__version__} has none")


@pytest.fixture
def share_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give a number of workers the same GPU: named so often, it counts as so many."""

    def share(workers: int) -> None:
        [gpu, *_] = visible_gpus(os.environ)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join([gpu] * workers))

    return share


@pytest.fixture
def figure() -> Callable[[str, str], None]:
    """Keep a figure for the table at the end of the test run."""
    return lambda what, value: _FIGURES.append((what, value))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _FIGURES:
        return
    import torch

    terminalreporter.section(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for what, value in _FIGURES:
        terminalreporter.line(f"{what}: {value}")
