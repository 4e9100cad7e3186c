"""What a backend may use of the core, besides the public names of `polytrain`."""

from __future__ import annotations

from polytrain.common.errors import BadDataError
from polytrain.data.plan.cursor import Cursor, Epoch
from polytrain.data.plan.position import DataPosition
from polytrain.data.plan.row_plan import Plan
from polytrain.data.shards.formats import empty_table, to_format
from polytrain.data.shards.groups import group_sizes
from polytrain.data.shards.tensor_shapes import TensorShapes
from polytrain.workers.call_counter import Calls
from polytrain.workers.context import Context
from polytrain.workers.worker_api import open_cursor, scratch_directory, starting_checkpoint

__all__ = [
    "BadDataError",
    "Calls",
    "Context",
    "Cursor",
    "DataPosition",
    "Epoch",
    "Plan",
    "TensorShapes",
    "empty_table",
    "group_sizes",
    "open_cursor",
    "scratch_directory",
    "starting_checkpoint",
    "to_format",
]
