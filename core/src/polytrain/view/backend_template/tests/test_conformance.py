"""The backend passes the conformance kit, whose data have the columns x0, x1, x2 and label."""

from polytrain_mylib import Mylib

from polytrain.testing import BackendConformance


class TestMylib(BackendConformance):
    backend = Mylib(rounds=8, label="label")
