"""The conformance kit: what every backend promises, as tests that its author inherits.

    from polytrain.testing import BackendConformance
    from polytrain_catboost import CatBoost

    class TestCatBoost(BackendConformance):
        backend = CatBoost(rounds=8, label="label")

That is a whole test file. The data set "train" of the kit has the columns x0, x1, x2 and label.
"""

import pytest

# Before they are imported: what fails in them shows its values.
pytest.register_assert_rewrite(
    "polytrain.testing.contract", "polytrain.testing.trainer", "polytrain.testing.conformance"
)

from polytrain.testing.conformance import BackendConformance, KnownFailure  # noqa: E402
from polytrain.testing.contract import ContractTier  # noqa: E402
from polytrain.testing.faults import Fault  # noqa: E402
from polytrain.testing.trainer import TrainerTier  # noqa: E402

__all__ = ["BackendConformance", "ContractTier", "Fault", "KnownFailure", "TrainerTier"]
