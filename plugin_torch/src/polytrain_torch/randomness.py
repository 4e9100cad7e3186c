"""Random numbers of a rank: seeded, saved, and gone on with."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_SEEDS = 1 << 32
"""NumPy takes no larger ones."""


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python, on every rank differently: with `seed` and the rank."""
    _seed(f"{seed} {dist.get_rank()}")


def random_state() -> dict[str, Any]:
    """The generators' states, as tensors and plain data."""
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": {**numpy, "state": {**numpy["state"], "key": _tensor(numpy["state"]["key"])}},
        "python": random.getstate(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on with these."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    random.setstate(state["python"])


def seed_newcomer(state: dict[str, Any], rank: int) -> None:
    """Seed a rank that has no state of its own, by another's and its number."""
    digest = hashlib.blake2b(state["torch"].numpy().tobytes(), digest_size=8).hexdigest()
    _seed(f"{digest} {rank}")


def _seed(of: str) -> None:
    digest = hashlib.blake2b(of.encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little") % _SEEDS
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _tensor(key: Any) -> torch.Tensor:
    # torch has few operations for unsigned numbers.
    return torch.from_numpy(key.astype(np.int64))
