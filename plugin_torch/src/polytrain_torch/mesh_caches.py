"""What torch remembers of device meshes beyond the end of their process groups."""

from __future__ import annotations

import sys


def forget_meshes() -> None:
    """Clear the results that torch keeps for operations on sharded tensors.

    A result holds the mesh of the first operation like it, with the names of its process groups. A
    later mesh of the same process is equal to it, also if its groups have different names.
    """
    if "torch.distributed.tensor._api" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
