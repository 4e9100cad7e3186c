"""Seeds, saves and restores the random number generators of a rank."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from polytrain_torch.checkpoints.safe_serialization import loaded
from polytrain_torch.collectives.gathering import from_rank_0
from polytrain_torch.private import tree_map


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python from `seed` and the rank: differently on every rank."""
    _seed(f"{seed} {dist.get_rank()}")
    _stand_for(seed_of(str(seed), octets=7))


def share_seed(store: dist.Store) -> None:
    """Share rank 0's seed, for numbers that all ranks draw alike without a collective."""
    if dist.get_rank() == 0:
        store.set("seed", str(torch.initial_seed()))
    _stand_for(int(store.get("seed")))


def share_function_seed() -> None:
    """Have `function_seed` return rank 0's on all ranks, until torch is seeded again.

    All ranks call this.
    """
    _stand_for(from_rank_0(function_seed()))


def function_seed() -> int:
    """Return a seed: the same on all ranks, unless the training function seeds them differently.

    Restored random states don't change it.
    """
    seeded, stands_for = _seeds
    own = torch.initial_seed()
    return stands_for if own == seeded else own


def seed_place(place: str) -> None:
    """Seed torch, NumPy and Python by a place in training; `function_seed` stays the same."""
    stands_for = function_seed()
    seed = seed_of(place, octets=4)
    random.seed(seed)
    np.random.seed(seed)
    # torch.manual_seed formats the stack at each call until CUDA is used.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    _stand_for(stands_for)


def _stand_for(seed: int) -> None:
    """Have `function_seed` return this seed until torch is seeded again."""
    global _seeds
    _seeds = torch.initial_seed(), seed


_seeds = 0, 0
"""torch's seed on this rank, and the seed that `function_seed` returns in its place."""


def enable_reproducibility(seed: int = 0) -> None:
    """Seed torch, NumPy and Python alike on every rank, and use deterministic algorithms only.

    Args:
        seed: a seed, the same on every rank. `seed_everything` seeds each rank differently.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    # cuBLAS is deterministic only with a workspace of fixed size.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def seed_of(text: str, *, octets: int) -> int:
    """Return a seed of `octets` bytes: the same for the same text, in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=octets).digest(), "little")


def restore_random_states(directory: Path) -> None:
    """Restore this rank's state from a checkpoint; seed a new rank from rank 0's and its number."""
    rank = dist.get_rank()
    own = directory / file_of(rank)
    state = loaded(own if own.exists() else directory / file_of(0))
    seed = function_seed()
    if own.exists():
        restore_random_state(state)
    else:
        digest = hashlib.blake2b(state["torch"].numpy().tobytes(), digest_size=8).hexdigest()
        _seed(f"{digest} {rank}")
    _stand_for(seed)


class RandomStream:
    """A random stream of its own for torch (CPU), NumPy and Python, apart from the user's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw from the stream in a block of code. The next block continues it."""
        states = _states()
        if self._states is None:
            random.seed(self._seed)
            np.random.seed(self._seed % (1 << 32))
            # torch.manual_seed would seed GPUs too.
            torch.default_generator.manual_seed(self._seed)
        else:
            _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(states)


def generators_of(of: Any) -> list[Any]:
    """Return the random number generators among an object's attributes."""
    return [value for value in getattr(of, "__dict__", {}).values() if _is_generator(value)]


def generators_within(of: Any, *, depth: int = 3) -> Iterator[Any]:
    """Yield the random number generators that an object has of its own, or what it is made of."""
    # At once: another thread may set attributes.
    for value in [*getattr(of, "__dict__", {}).values()]:
        for each in value if isinstance(value, list | tuple) and len(value) < _FEW else [value]:
            if _is_generator(each):
                if id(each) not in _DEFAULTS:
                    yield each
            elif depth and not isinstance(each, ModuleType):
                yield from generators_within(each, depth=depth - 1)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % (1 << 32))


def seed_in(generators: Sequence[Any]) -> int | None:
    """Return a seed that depends on the generators' states; None without generators."""
    states = [
        generator.get_state().tolist()
        if isinstance(generator, torch.Generator)
        else generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.getstate()
        if isinstance(generator, random.Random)
        else generator.get_state()
        for generator in generators
    ]
    return seed_of(repr(states), octets=4) if states else None


def generator_state(generator: Any) -> dict[str, Any]:
    """Return the state of a generator of torch, NumPy or Python, as tensors and plain data."""
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state()
    elif isinstance(generator, random.Random):
        state = generator.getstate()
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    plain = tree_map(_as_tensor, state)
    return {"kind": _kind_of(generator), "state": plain}


def restore_generator(generator: Any, saved: dict[str, Any]) -> None:
    """Restore what `generator_state` has returned, unless it is another kind of generator's."""
    if saved["kind"] != _kind_of(generator):
        return
    if isinstance(generator, torch.Generator):
        generator.set_state(saved["state"])
    elif isinstance(generator, random.Random):
        generator.setstate(saved["state"])
    else:
        whole = tree_map(_as_array, saved["state"])
        if isinstance(generator, np.random.RandomState):
            generator.set_state(whole)
        else:
            generator.bit_generator.state = whole


def _kind_of(generator: Any) -> str:
    # NumPy's generators differ by where their bits come from.
    return type(getattr(generator, "bit_generator", generator)).__name__


def _as_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def _as_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf


_FEW = 20
"""Longer lists are data."""

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_DEFAULTS = {
    id(torch.default_generator),
    *(id(getattr(draw, "__self__", None)) for draw in (np.random.random_sample, random.random)),
}
"""Ids of the generators of the modules' functions, which checkpoints have."""


def _is_generator(value: Any) -> bool:
    # The operating system's has no state.
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    python, numpy, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(own)


def random_state() -> dict[str, Any]:
    """Return the states of all default generators, as tensors and plain data."""
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": {**numpy, "state": {**numpy["state"], "key": _tensor(numpy["state"]["key"])}},
        "python": random.getstate(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    random.setstate(state["python"])


def _seed(of: str) -> None:
    # NumPy refuses larger seeds.
    number = seed_of(of, octets=4)
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def file_of(rank: int) -> str:
    """Return the name of the file with a rank's random states in a checkpoint."""
    return f"random-{rank}.pt"


def _tensor(key: Any) -> torch.Tensor:
    # torch has few operations for unsigned integers.
    return torch.from_numpy(key.astype(np.int64))
