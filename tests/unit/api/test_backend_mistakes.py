"""Backends that can't be used: one that is passed itself, and one that is installed beside it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polytrain import CheckpointError, InvalidJobError, Result, RunConfig, ScalingConfig, Trainer
from polytrain.backends.reference import Reference
from polytrain_plugins import ContractVersionError, RegistryError
from polytrain_plugins.registry import GROUP, installed_entry_points

DATA = {"train": {"x": [1.0, 2.0], "y": [1.0, 0.0]}}


def trainer(backend: Any, **scaling: Any) -> Trainer:
    return Trainer(backend, datasets=DATA, scaling_config=ScalingConfig(**scaling))


class Old(Reference):
    contract_version: ClassVar[int] = 0


def test_a_backend_of_another_contract_is_refused_without_an_entry_point_too() -> None:
    with pytest.raises(ContractVersionError, match="Old was written for version 0 of the backend"):
        trainer(Old(label="y"))


class Undeclared(Reference):
    capabilities: ClassVar[Any] = {"declarative": True}


def test_a_backend_that_declares_nothing_is_refused() -> None:
    with pytest.raises(RegistryError, match="Undeclared has a dict as its `capabilities`"):
        trainer(Undeclared(label="y"))


class CountsHalfSteps(Reference):
    @property
    def total_steps(self) -> Any:
        return self.rounds / 2


def test_steps_that_are_no_number_of_steps_are_refused_before_anything_starts() -> None:
    """The journal of the run could never be read again."""
    with pytest.raises(TypeError, match=r"CountsHalfSteps.total_steps returned 5.0. Return a whol"):
        trainer(CountsHalfSteps(label="y"))


class NeedsAModuleOfAPackage(Reference):
    requires: ClassVar[Mapping[str, str]] = {"package_of_nobody.module": "pip install nobody"}


def test_a_module_of_a_missing_package_is_missing() -> None:
    with pytest.raises(InvalidJobError) as caught:
        trainer(NeedsAModuleOfAPackage(label="y"))
    assert "needs package_of_nobody.module, which is not installed. Install it with: pip in" in str(
        caught.value
    )


@dataclass(frozen=True, kw_only=True)
class HoldsALock(Reference):
    lock: Any = None


def test_a_backend_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    backend = HoldsALock(label="y", lock=threading.Lock())
    with pytest.raises(InvalidJobError) as caught:
        trainer(backend, num_workers=2)
    assert "backend: it can't be sent to the workers: `backend.lock` is a lock" in str(caught.value)
    # Nobody sends it.
    assert trainer(backend, num_workers=0)


def test_a_backend_may_hold_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytrain.functions.function_checks._MOST_BYTES", 10)
    assert trainer(HoldsALock(label="y", lock="a model to continue"), num_workers=2)


def test_a_broken_backend_that_is_installed_too_is_nobody_elses_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = EntryPoint(name="broken", value="module_of_nobody", group=GROUP)
    installed = (broken, *installed_entry_points(GROUP))
    monkeypatch.setattr("polytrain_plugins.registry.installed_entry_points", lambda _: installed)
    with pytest.raises(InvalidJobError, match="the reference backend has no virtual workers"):
        trainer(replace(Reference(), label="y"), num_workers=2, virtual_workers=2)


@dataclass(frozen=True, kw_only=True)
class RefusesToBeMade(Reference):
    def __post_init__(self) -> None:
        raise ValueError("give an objective")


def test_a_result_is_read_although_its_backend_refuses_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that are functions aren't in the journal; a backend may insist on one."""
    config = RunConfig(storage_path=tmp_path, progress=False)
    inline = ScalingConfig(num_workers=0)
    made = Trainer(
        Reference(rounds=1, label="y"), datasets=DATA, scaling_config=inline, run_config=config
    ).fit()
    monkeypatch.setattr("polytrain.api.result.load_backend", lambda _: RefusesToBeMade)
    result = Result.from_path(made.path)
    assert result.metrics == made.metrics
    with pytest.raises(CheckpointError, match=r"or pass it: Result.from_path\(path, backend=…\)"):
        result.load_model()
