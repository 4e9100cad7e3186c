"""LightGBM passes the kit."""

from polytrain.testing import BackendConformance
from polytrain_lightgbm import LightGBM


class TestLightGBM(BackendConformance):
    backend = LightGBM(params={"objective": "binary"}, num_boost_round=6, label="label")
