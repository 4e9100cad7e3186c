"""The states of the random generators that are kept are those of now, whatever was drawn since."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytrain_torch.survivors import generators
from polytrain_torch.survivors.generators import Generators, canonical, restorable

CHANGES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a number of Python's": random.random,
    "a normal number of Python's": lambda: random.gauss(0, 1),
    "all of Python's words": lambda: random.getrandbits(624 * 32),
    "Python's seed": lambda: random.seed(7),
    "a number of NumPy's": np.random.rand,
    "a normal number of NumPy's": np.random.randn,
    "all of NumPy's words": lambda: np.random.bytes(624 * 4),
    "NumPy's seed": lambda: np.random.seed(7),
    "another generator of NumPy's": lambda: np.random.set_bit_generator(np.random.PCG64(7)),
    "NumPy's first generator": lambda: np.random.set_bit_generator(np.random.MT19937(7)),
    "a number of torch's": lambda: torch.rand(()),
    "a normal number of torch's": lambda: torch.randn(()),
    "all of torch's words": lambda: torch.rand(624),
    "torch's seed": lambda: torch.manual_seed(7),
}


@contextmanager
def numpys_own() -> Iterator[None]:
    """In the end, NumPy's generator is the one of the beginning."""
    own = np.random.get_bit_generator()
    try:
        yield
    finally:
        np.random.set_bit_generator(own)


def expect_states_of_now(kept: Generators) -> None:
    own, numpy, python, gpus = kept.states()
    assert canonical(own) == torch.get_rng_state().numpy().tobytes()
    assert gpus == b""
    now = np.random.get_state(legacy=False)
    if now["bit_generator"] == "MT19937":
        states = restorable((own, numpy, python, gpus))
        assert states["python"] == random.getstate()
        found = states["numpy"]
        assert found["state"]["key"].tolist() == now["state"]["key"].tolist()
        assert found["state"]["pos"] == now["state"]["pos"]
        assert (found["has_gauss"], found["gauss"]) == (now["has_gauss"], now["gauss"])


@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=12))
def test_each_look_shows_what_is_there(changes: list[str]) -> None:
    with numpys_own():
        kept = Generators()
        expect_states_of_now(kept)
        for change in changes:
            CHANGES[change]()
            expect_states_of_now(kept)


def test_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Generators()
    monkeypatch.setattr(generators, "_state_of", Mock(side_effect=AssertionError))
    torch.rand(())
    assert canonical(kept.states()[0]) == torch.get_rng_state().numpy().tobytes()
