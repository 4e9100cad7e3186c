"""Losses of worker processes that torch trains in."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections import deque

import cloudpickle

# Worker processes can't import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def lose_all_ranks() -> None:
    """Kill all worker processes at once, as soon as what they have reported is committed.

    All ranks call this, on one machine. No survivor can hand on a newer state: both kills are in
    one function of C, which keeps the GIL, so that this process's other threads stand still.
    """
    import torch.distributed as dist

    import polytrain

    if dist.get_rank() == 0:
        polytrain.get_checkpoint()  # It waits for the commit.
    processes = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    if dist.get_rank() == dist.get_world_size() - 1:
        # This one is the last.
        deque(map(os.kill, processes, itertools.repeat(signal.SIGKILL)), maxlen=0)
    signal.pause()
