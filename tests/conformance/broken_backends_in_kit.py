"""The kit over backends that are broken on purpose.

Not collected by itself: its failures are the point. See `test_kit.py`.
"""

from __future__ import annotations

from tests.conformance.broken_backends import (
    DropsTheLastBatch,
    ForgetsItsPast,
    LeaksAPort,
    LeaksAVariable,
    SkipsTheJoin,
)

from polytrain.testing import ChaosTier, ContractTier, TrainerTier


class TestSkipsTheJoin(ContractTier, TrainerTier):
    backend = SkipsTheJoin(rounds=3, label="label")


class TestDropsTheLastBatch(ContractTier):
    backend = DropsTheLastBatch(rounds=3, label="label")


class TestLeaksAPort(ContractTier):
    backend = LeaksAPort(rounds=3, label="label")


class TestLeaksAVariable(ContractTier):
    backend = LeaksAVariable(rounds=3, label="label")


class TestForgetsItsPast(ChaosTier):
    backend = ForgetsItsPast(rounds=8, label="label")
