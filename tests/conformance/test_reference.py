"""The reference backends pass the whole kit: both kinds of checkpoint."""

from polytrain.testing import BackendConformance
from polytrain.testing.reference import Reference


class TestReference(BackendConformance):
    backend = Reference(rounds=8, label="label")
