"""Mistakes that the contract tier finds without a process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from polytrain.backends.reference import Reference
from polytrain.testing import ContractTier


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
