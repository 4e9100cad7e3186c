"""What a backend may use of the core, besides the public names of `polytrain`.

Each name is loaded when it is first used: a driver that imports a backend needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain.data.plan.cursor import Cursor, Epoch
    from polytrain.data.plan.position import DataPosition
    from polytrain.data.plan.row_plan import Plan
    from polytrain.data.shards.groups import group_sizes
    from polytrain.data.shards.tensor_shapes import TensorShapes, check_named, check_range
    from polytrain.data.types.columns import empty_table, to_format
    from polytrain.errors import BadDataError
    from polytrain.keras_layers import adapted_digests, nested_layers, unequal_layers
    from polytrain.workers.session.call_counter import Calls
    from polytrain.workers.session.context import Context
    from polytrain.workers.session.worker_api import (
        open_cursor,
        scratch_directory,
        starting_checkpoint,
    )

__all__ = [
    "BadDataError",
    "Calls",
    "Context",
    "Cursor",
    "DataPosition",
    "Epoch",
    "Plan",
    "TensorShapes",
    "adapted_digests",
    "check_named",
    "check_range",
    "empty_table",
    "group_sizes",
    "nested_layers",
    "open_cursor",
    "scratch_directory",
    "starting_checkpoint",
    "to_format",
    "unequal_layers",
]

_DOOR = Door(
    module=__name__,
    homes={
        "BadDataError": "polytrain.errors",
        "Calls": "polytrain.workers.session.call_counter",
        "Context": "polytrain.workers.session.context",
        "Cursor": "polytrain.data.plan.cursor",
        "DataPosition": "polytrain.data.plan.position",
        "Epoch": "polytrain.data.plan.cursor",
        "Plan": "polytrain.data.plan.row_plan",
        "TensorShapes": "polytrain.data.shards.tensor_shapes",
        "adapted_digests": "polytrain.keras_layers",
        "check_named": "polytrain.data.shards.tensor_shapes",
        "check_range": "polytrain.data.shards.tensor_shapes",
        "empty_table": "polytrain.data.types.columns",
        "group_sizes": "polytrain.data.shards.groups",
        "nested_layers": "polytrain.keras_layers",
        "open_cursor": "polytrain.workers.session.worker_api",
        "scratch_directory": "polytrain.workers.session.worker_api",
        "starting_checkpoint": "polytrain.workers.session.worker_api",
        "to_format": "polytrain.data.types.columns",
        "unequal_layers": "polytrain.keras_layers",
    },
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
