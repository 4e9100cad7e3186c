"""Virtual workers: the same weights, to the bit, at any number of ranks.

A global batch is always cut into the same C micro-batches. Each is computed apart: with its own
random numbers, and from the buffers with which the step began. Then their gradients are added in
the order of one tree (`collectives.tree_sums`). So nothing depends on which rank computes which
micro-batch. A rank computes several by a loop within the step (`micro_batches`), and whatever the
training function does outside of it happens once for each global batch.
"""

from polytrain_torch.virtual_workers.loop import (
    VirtualWorkers,
    current,
    micro_batches,
    refuse_virtual_workers,
    virtual_workers,
)

__all__ = [
    "VirtualWorkers",
    "current",
    "micro_batches",
    "refuse_virtual_workers",
    "virtual_workers",
]
