"""Mistakes that the contract tier finds without a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from polytrain.backends.reference import Reference
from polytrain.testing import BackendConformance, ContractTier


@dataclass(frozen=True, kw_only=True)
class NeedsAnOption(Reference):
    depth: int


def test_an_option_without_a_default_is_named() -> None:
    """The kit's runs with a training function would end with a TypeError each."""
    tier = ContractTier()
    tier.backend = NeedsAnOption(depth=1)
    with pytest.raises(AssertionError, match=r"give a default(.|\n)*depth"):
        tier.test_is_a_value()
    tier.backend = Reference()
    tier.test_is_a_value()


@dataclass(frozen=True, kw_only=True)
class TakesDatasets(Reference):
    datasets: int = 2


def test_an_option_that_make_trainer_would_not_pass_on_is_named() -> None:
    tier = ContractTier()
    tier.backend = TakesDatasets()
    with pytest.raises(AssertionError, match=r"takes these arguments for itself(.|\n)*datasets"):
        tier.test_is_a_value()


@dataclass(frozen=True, kw_only=True)
class TakesOptions(Reference):
    options: int = 2


def test_an_option_may_be_called_options() -> None:
    """`make_trainer` passes it on: it is only the name of its `**options`."""
    tier = ContractTier()
    tier.backend = TakesOptions()
    tier.test_is_a_value()


class Misspelt(Reference):
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"round"})


def test_an_option_that_may_change_and_is_not_there_is_named() -> None:
    """A resume with another number of rounds would be refused."""
    tier = ContractTier()
    tier.backend = Misspelt()
    with pytest.raises(AssertionError, match="mutable_on_resume names no option"):
        tier.test_is_a_value()


def test_a_class_in_place_of_a_backend_is_refused_where_it_is_given() -> None:
    with pytest.raises(TypeError, match=r"Wrong.backend is the class Reference. Give a backend w"):
        type("Wrong", (BackendConformance,), {"backend": Reference})
