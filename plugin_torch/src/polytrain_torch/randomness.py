"""Random numbers of a rank: seeded, saved, and resumed."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from polytrain import get_context
from polytrain_torch.collecting import gathered
from polytrain_torch.safe_serialization import loaded


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python, on every rank differently: with `seed` and the rank."""
    _seed(f"{seed} {dist.get_rank()}")


def seed_of(text: str, *, octets: int) -> int:
    """A seed of so many bytes, the same for the same text in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=octets).digest(), "little")


def save_random_states(directory: Path | None) -> None:
    """Write every rank's, or this rank's where every rank writes checkpoints. All ranks call it.

    Args:
        directory: of this rank's part of the checkpoint; None if it has none.
    """
    rank = dist.get_rank()
    if get_context().every_rank_writes():
        assert directory is not None
        torch.save(random_state(), directory / _file(rank))
        return
    everybodys = gathered(random_state())
    if directory is not None and rank == 0:
        for number, state in enumerate(everybodys):
            torch.save(state, directory / _file(number))


def restore_random_states(directory: Path) -> None:
    """Go on with those that a checkpoint holds. A rank that is new is seeded by its number."""
    rank = dist.get_rank()
    own = directory / _file(rank)
    state = loaded(own if own.exists() else directory / _file(0))
    if own.exists():
        restore_random_state(state)
    else:
        digest = hashlib.blake2b(state["torch"].numpy().tobytes(), digest_size=8).hexdigest()
        _seed(f"{digest} {rank}")


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


def _seed(of: str) -> None:
    # NumPy takes no larger ones.
    number = seed_of(of, octets=4)
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _file(rank: int) -> str:
    return f"random-{rank}.pt"


def _tensor(key: Any) -> torch.Tensor:
    # torch has few operations for unsigned numbers.
    return torch.from_numpy(key.astype(np.int64))
