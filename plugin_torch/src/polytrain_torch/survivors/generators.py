"""The states of the default random generators, as bytes: read after each step, so quickly.

Asking NumPy and Python for theirs takes long. So their memory is looked at first, which says
whether anything was drawn: NumPy shows its own (`BitGenerator.ctypes`).
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
from typing import Any

import numpy as np
import torch

_bit_generator: Any = getattr(np.random, "get_bit_generator")  # noqa: B009  # its stubs lack it

_TWISTER = 625 * 4
"""Bytes of the Mersenne Twister's words, and its place in them."""


class Generators:
    """Reads the states of the default generators of torch, NumPy, Python and all visible GPUs."""

    def __init__(self) -> None:
        self._numpy, self._python = _Numpy(), _Python()

    def states(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Return the four states. That of the GPUs is empty until CUDA is used."""
        own = torch.get_rng_state().numpy().tobytes()
        return own, self._numpy.state(), self._python.state(), _of_gpus()


def _of_gpus() -> bytes:
    if not torch.cuda.is_initialized():
        return b""
    states = [each.get_state().numpy().tobytes() for each in torch.cuda.default_generators]
    return pickle.dumps(states, protocol=5)


class _Numpy:
    def __init__(self) -> None:
        self._generator: Any = None
        self._address: int | None = None
        self._seen: bytes | None = None
        """The words at the last look; None if they can't tell whether anything was drawn."""

        self._state = b""

    def state(self) -> bytes:
        generator = _bit_generator()
        if generator is not self._generator:
            self._generator, self._seen = generator, None
            is_known = isinstance(generator, np.random.MT19937)
            self._address = generator.ctypes.state_address if is_known else None
        words = None if self._address is None else ctypes.string_at(self._address, _TWISTER)
        if words is None or words != self._seen:
            state: Any = np.random.get_state(legacy=False)
            self._state = pickle.dumps(state, protocol=5)
            # Of two normal numbers that are drawn at once, the second is taken without a trace.
            self._seen = None if state["has_gauss"] else words
        return self._state


class _Python:
    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # it is a method
        # Its words follow the object's header, as long as they prove to be there.
        self._address = id(self._generator) + object.__basicsize__
        index, *words = struct.unpack(f"i{_TWISTER // 4 - 1}I", self._words())
        self._has_words = (*words, index) == random.getstate()[1]
        self._seen: tuple[bytes, Any] | None = None
        self._state = b""

    def state(self) -> bytes:
        seen = (self._words(), self._generator.gauss_next) if self._has_words else None
        if seen is None or seen != self._seen:
            self._state, self._seen = pickle.dumps(random.getstate(), protocol=5), seen
        return self._state

    def _words(self) -> bytes:
        return ctypes.string_at(self._address, _TWISTER)


def restorable(states: tuple[bytes, bytes, bytes, bytes]) -> dict[str, Any]:
    """Return what `Generators.states` has returned, as `randomness.random_state` does."""
    own, numpy, python, gpus = states
    of_numpy = pickle.loads(numpy)
    key = torch.from_numpy(of_numpy["state"]["key"].astype(np.int64))
    return {
        "torch": _tensor(own),
        "cuda": [_tensor(each) for each in pickle.loads(gpus)] if gpus else [],
        "numpy": {**of_numpy, "state": {**of_numpy["state"], "key": key}},
        "python": pickle.loads(python),
    }


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
