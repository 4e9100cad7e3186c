"""What the examples of one library each have in common: digits, and a worker's death."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import polytrain

EPOCHS = 8
ROWS = 1440
"""Digits to learn from; 357 more are there to be recognised."""

Digits = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def digits() -> tuple[Digits, Digits]:
    """Images `(rows, 64)` from 0 to 1 and what they show: to learn from, and to be recognised."""
    from sklearn.datasets import load_digits

    images, shown = load_digits(return_X_y=True)
    # Whose handwriting it is goes with the place.
    order = np.random.default_rng(0).permutation(len(images))
    images, shown = (images[order] / 16).astype(np.float32), shown[order]
    return (images[:ROWS], shown[:ROWS]), (images[ROWS:], shown[ROWS:])


def kill_a_worker(epoch: int) -> None:
    """SIGKILL rank 1 in its fifth epoch, once: the run goes on from its last checkpoint.

    Raises:
        RuntimeError: it has begun anew instead.
    """
    context = polytrain.get_context()
    if context.get_attempt() == 1 and epoch < EPOCHS // 2 - 1:
        raise RuntimeError(f"epoch {epoch} is trained once more, although there is a checkpoint")
    if epoch == EPOCHS // 2 and context.get_world_rank() == 1 and context.get_attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def tell(result: polytrain.Result, recognised: np.ndarray[Any, Any]) -> None:
    """Print what came of a run, whose model has recognised these."""
    _, (_, shown) = digits()
    print(f"{int(result.metrics['workers'])} workers, {result.restarts} restart")
    print(f"{(recognised == shown).mean():.1%} of {len(shown)} digits are recognised")
