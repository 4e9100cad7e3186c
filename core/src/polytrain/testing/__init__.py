"""The conformance kit: tests of every backend's promises, which its author inherits.

    from polytrain.testing import BackendConformance
    from polytrain_catboost import CatBoost

    class TestCatBoost(BackendConformance):
        backend = CatBoost(rounds=8, label="label")

This is a complete test file. The data set "train" of the kit has the columns x0, x1, x2 and label.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytrain.testing.chaos import ChaosTier
    from polytrain.testing.conformance import BackendConformance, KnownFailure
    from polytrain.testing.contract import ContractTier
    from polytrain.testing.faults import Fault
    from polytrain.testing.network import NetworkTier
    from polytrain.testing.trainer import TrainerTier

__all__ = [
    "BackendConformance",
    "ChaosTier",
    "ContractTier",
    "Fault",
    "KnownFailure",
    "NetworkTier",
    "TrainerTier",
]

_HOME_OF = {
    "BackendConformance": "conformance",
    "ChaosTier": "chaos",
    "ContractTier": "contract",
    "Fault": "faults",
    "KnownFailure": "conformance",
    "NetworkTier": "network",
    "TrainerTier": "trainer",
}


def __getattr__(name: str) -> Any:
    # Not at import: the reference backend is in this package too, and needs neither pytest nor Ray.
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    tiers = ("contract", "trainer", "chaos", "network", "conformance")
    pytest.register_assert_rewrite(*(f"{__name__}.{tier}" for tier in tiers))
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
