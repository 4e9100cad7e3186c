"""The kit's network tier, of the backend that is the quickest to start."""

from __future__ import annotations

from polytrain.backends.reference import Reference
from polytrain.testing import NetworkTier


class TestReference(NetworkTier):
    backend = Reference(rounds=8, label="label")
