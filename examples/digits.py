"""Shared by the examples: the digits, the kill of a worker, and the output."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import polytrain

EPOCHS = 8
ROWS = 1440
"""Number of digits to train on; 357 more are for evaluation."""

Digits = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def digits() -> tuple[Digits, Digits]:
    """Images `(rows, 64)` from 0 to 1 and their labels, to train on and to evaluate on."""
    from sklearn.datasets import load_digits

    images, shown = load_digits(return_X_y=True)
    # The digits are ordered by writer, so shuffle them.
    order = np.random.default_rng(0).permutation(len(images))
    images, shown = (images[order] / 16).astype(np.float32), shown[order]
    return (images[:ROWS], shown[:ROWS]), (images[ROWS:], shown[ROWS:])


def kill_a_worker(epoch: int) -> None:
    """SIGKILL rank 1 in its fifth epoch, once. The run then resumes from its last checkpoint.

    Raises:
        RuntimeError: the run has started over instead.
    """
    context = polytrain.get_context()
    if context.get_attempt() == 1 and epoch < EPOCHS // 2 - 1:
        raise RuntimeError(f"epoch {epoch} is trained again, although there is a checkpoint")
    if epoch == EPOCHS // 2 and context.get_world_rank() == 1 and context.get_attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def print_result(result: polytrain.Result, recognised: np.ndarray[Any, Any]) -> None:
    """Print the result of a run whose model predicts these labels."""
    _, (_, shown) = digits()
    print(f"{int(result.metrics['workers'])} workers, {result.restarts} restart")
    print(f"{(recognised == shown).mean():.1%} of {len(shown)} digits are recognised")
