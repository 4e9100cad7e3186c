"""What a backend may use of the core, besides the public names of `polytrain`.

Each name is loaded when it is first used: a driver that imports a backend needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.lazy_names import LazyNames

if TYPE_CHECKING:
    from polytrain.data.plan.cursor import Cursor, Epoch
    from polytrain.data.plan.position import DataPosition
    from polytrain.data.plan.row_plan import Plan
    from polytrain.data.shards.groups import group_sizes
    from polytrain.data.shards.tensor_shapes import TensorShapes, check_named, check_range
    from polytrain.data.types.columns import empty_table, to_format
    from polytrain.errors import BadDataError
    from polytrain.functions.users_code import is_installed
    from polytrain.keras_layers import adapted_digests, nested_layers, unequal_layers
    from polytrain.linux.kept_states import KeptState, KeptStates
    from polytrain.workers.session.context import Context
    from polytrain.workers.session.rank_connections import (
        LeaderListener,
        RankConnection,
        connected_ranks,
        leader_listener,
    )
    from polytrain.workers.session.socket_collective import SocketCollective
    from polytrain.workers.session.survivor import NotCleanError, Place, StateWriter, Survivor
    from polytrain.workers.session.worker_api import (
        Calls,
        compare_replicas,
        keep_all_batches,
        open_cursor,
        record_exactness,
        scratch_directory,
        starting_checkpoint,
        survivor,
        training_begins,
    )

__all__ = [
    "BadDataError",
    "Calls",
    "Context",
    "Cursor",
    "DataPosition",
    "Epoch",
    "KeptState",
    "KeptStates",
    "LeaderListener",
    "NotCleanError",
    "Place",
    "Plan",
    "RankConnection",
    "SocketCollective",
    "StateWriter",
    "Survivor",
    "TensorShapes",
    "adapted_digests",
    "check_named",
    "check_range",
    "compare_replicas",
    "connected_ranks",
    "empty_table",
    "group_sizes",
    "is_installed",
    "keep_all_batches",
    "leader_listener",
    "nested_layers",
    "open_cursor",
    "record_exactness",
    "scratch_directory",
    "starting_checkpoint",
    "survivor",
    "to_format",
    "training_begins",
    "unequal_layers",
]

_NAMES = LazyNames(
    module=__name__,
    homes={
        "polytrain.keras_layers": (
            "adapted_digests",
            "nested_layers",
            "unequal_layers",
        ),
        "polytrain.data.plan.cursor": (
            "Cursor",
            "Epoch",
        ),
        "polytrain.data.plan.position": ("DataPosition",),
        "polytrain.data.plan.row_plan": ("Plan",),
        "polytrain.data.types.columns": (
            "empty_table",
            "to_format",
        ),
        "polytrain.data.shards.groups": ("group_sizes",),
        "polytrain.data.shards.tensor_shapes": (
            "TensorShapes",
            "check_named",
            "check_range",
        ),
        "polytrain.errors": ("BadDataError",),
        "polytrain.functions.users_code": ("is_installed",),
        "polytrain.workers.session.context": ("Context",),
        "polytrain.workers.session.rank_connections": (
            "LeaderListener",
            "RankConnection",
            "connected_ranks",
            "leader_listener",
        ),
        "polytrain.workers.session.socket_collective": ("SocketCollective",),
        "polytrain.linux.kept_states": (
            "KeptState",
            "KeptStates",
        ),
        "polytrain.workers.session.survivor": (
            "NotCleanError",
            "Place",
            "StateWriter",
            "Survivor",
        ),
        "polytrain.workers.session.worker_api": (
            "Calls",
            "compare_replicas",
            "keep_all_batches",
            "open_cursor",
            "record_exactness",
            "scratch_directory",
            "starting_checkpoint",
            "survivor",
            "training_begins",
        ),
    },
)


__getattr__ = _NAMES.get
__dir__ = _NAMES.names
