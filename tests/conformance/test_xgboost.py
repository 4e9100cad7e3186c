"""XGBoost passes the kit."""

from polytrain.testing import BackendConformance
from polytrain_xgboost import XGBoost


class TestXGBoost(BackendConformance):
    backend = XGBoost(params={"objective": "binary:logistic"}, num_boost_round=6, label="label")
