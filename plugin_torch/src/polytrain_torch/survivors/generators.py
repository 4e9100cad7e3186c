"""The states of the default random generators, as bytes: read after each step, so quickly.

Asking for them takes long. So torch's is copied from memory, and for NumPy and Python a little of
theirs is looked at first, which says whether anything was drawn: NumPy shows its own
(`BitGenerator.ctypes`). Each number that is drawn moves the place in the Mersenne Twister's words,
and each time that it has come to their end, all words change.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
from typing import Any

import numpy as np
import torch

from polytrain_torch.private import address_of

_bit_generator: Any = getattr(np.random, "get_bit_generator")  # noqa: B009  # its stubs lack it

_WORDS = 624
"""Of the Mersenne Twister. Its place in them follows in NumPy's memory, in Python's it precedes."""

_LOOKED_AT = 5 * 4
"""Bytes: the place, and the words beside it."""

_TORCHS = struct.Struct(f"Qi?3xI{_WORDS}I4xf?3xd?7x")
"""What torch has in memory: the seed, the number of words that are left and whether it is seeded,
the place, the words, and two normal numbers that wait for who draws next, if there are any."""

_BEFORE_WORDS = 256
"""Bytes of one of torch's generators in which the seed is looked for."""

_TORCHS_STATE = struct.Struct(f"QiiQ{_WORDS}Q3di4xf?3x")
"""The same as torch's `get_state` returns it."""


class Generators:
    """Reads the states of the default generators of torch, NumPy, Python and all visible GPUs."""

    def __init__(self) -> None:
        self._torch, self._numpy, self._python = _Torch(), _Numpy(), _Python()

    def states(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Return the four states; see `canonical`. That of the GPUs is empty until CUDA is used."""
        own, numpy, python = self._torch.state(), self._numpy.state(), self._python.state()
        return own, numpy, python, _of_gpus()


def _of_gpus() -> bytes:
    generators = torch.cuda.default_generators
    return pickle.dumps([*map(_state_of, generators)], protocol=5) if generators else b""


def _state_of(generator: torch.Generator) -> bytes:
    state: bytes = generator.get_state().numpy().tobytes()
    return state


class _Torch:
    def __init__(self) -> None:
        # A generator's words lie behind what all kinds have, as long as they prove to be there.
        generator = torch.Generator()
        torch.randn(1, generator=generator)
        state, address = _state_of(generator), address_of(generator)
        seed_and_left = state[: struct.calcsize("Qi")]
        at = max(ctypes.string_at(address, _BEFORE_WORDS).find(seed_and_left), 0)
        has_words = canonical(ctypes.string_at(address + at, _TORCHS.size)) == state
        place = address_of(torch.default_generator) + at
        self._memory = _memory(place, _TORCHS.size) if has_words else None

    def state(self) -> bytes:
        if self._memory is None:
            return _state_of(torch.default_generator)
        content: bytes = self._memory.raw
        return content


def canonical(own: bytes) -> bytes:
    """Return torch's state as `get_state` does, if it is as in memory.

    There it has gaps, and numbers that are gone: it can't be compared with another one's.
    """
    if len(own) != _TORCHS.size:
        return own
    *words, number, has_number, normal, has_normal = _TORCHS.unpack(own)
    normals = 0.0, normal if has_normal else 0.0, 0.0, has_normal
    return _TORCHS_STATE.pack(*words, *normals, number if has_number else 0.0, has_number)


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
        "torch": _tensor(canonical(own)),
        "cuda": [_tensor(each) for each in pickle.loads(gpus)] if gpus else [],
        "numpy": {**of_numpy, "state": {**of_numpy["state"], "key": key}},
        "python": pickle.loads(python),
    }


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
