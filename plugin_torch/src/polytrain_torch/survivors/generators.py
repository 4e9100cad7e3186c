"""The states of the default random generators, as bytes: read after each step, so quickly.

Asking NumPy and Python for theirs takes long. So a little of their memory is looked at first, which
says whether anything was drawn: NumPy shows its own (`BitGenerator.ctypes`). Each number that is
drawn moves the place in the Mersenne Twister's words, and each time that it has come to their end,
all words change.
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

_WORDS = 624
"""Of the Mersenne Twister. Its place in them follows in NumPy's memory, in Python's it precedes."""

_LOOKED_AT = 5 * 4
"""Bytes: the place, and the words beside it."""


class Generators:
    """Reads the states of the default generators of torch, NumPy, Python and all visible GPUs."""

    def __init__(self) -> None:
        self._numpy, self._python = _Numpy(), _Python()

    def states(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Return the four states. That of the GPUs is empty until CUDA is used."""
        own = torch.default_generator.get_state().numpy().tobytes()
        return own, self._numpy.state(), self._python.state(), _of_gpus()


def _of_gpus() -> bytes:
    if not torch.cuda.is_initialized():
        return b""
    states = [each.get_state().numpy().tobytes() for each in torch.cuda.default_generators]
    return pickle.dumps(states, protocol=5)


class _Numpy:
    def __init__(self) -> None:
        self._generator: Any = None
        self._look: Any = None
        """The memory that is looked at; None if the generator has other words."""

        self._seen: bytes | None = None
        """What was there at last; None if it can't tell whether anything was drawn."""

        self._state = b""

    def state(self) -> bytes:
        generator = _bit_generator()
        if generator is not self._generator:
            self._generator, self._look, self._seen = generator, None, None
            if isinstance(generator, np.random.MT19937):
                end = generator.ctypes.state_address + (_WORDS + 1) * 4
                self._look = _memory(end - _LOOKED_AT, _LOOKED_AT)
        now = None if self._look is None else self._look.raw
        if now is None or now != self._seen:
            state: Any = np.random.get_state(legacy=False)
            self._state = pickle.dumps(state, protocol=5)
            # Of two normal numbers that are drawn at once, the second is taken without a trace.
            self._seen = None if state["has_gauss"] else now
        return self._state


class _Python:
    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # it is a method
        # Its words follow the object's header, as long as they prove to be there.
        address = id(self._generator) + object.__basicsize__
        index, *words = struct.unpack(f"i{_WORDS}I", _memory(address, (_WORDS + 1) * 4).raw)
        has_words = (*words, index) == random.getstate()[1]
        self._look = _memory(address, _LOOKED_AT) if has_words else None
        self._seen: tuple[bytes, Any] | None = None
        self._state = b""

    def state(self) -> bytes:
        seen = None if self._look is None else (self._look.raw, self._generator.gauss_next)
        if seen is None or seen != self._seen:
            self._state, self._seen = pickle.dumps(random.getstate(), protocol=5), seen
        return self._state


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


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
