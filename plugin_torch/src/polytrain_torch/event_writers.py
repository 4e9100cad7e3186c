"""Has TensorBoard drop events that a restart logs again, in a library logger's event files."""

from __future__ import annotations

from typing import Any

from polytrain_torch.private import add_event


def drop_events(writer: Any, step: int) -> None:
    """Have TensorBoard drop earlier events of this step and later ones.

    Args:
        writer: a `SummaryWriter` of torch or tensorboardX.
        step: the first step that is logged again.
    """
    if type(writer).__module__.startswith("tensorboardX"):
        from tensorboardX.proto import event_pb2
    else:
        from tensorboard.compat.proto import event_pb2
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    add_event(writer, event_pb2.Event(session_log=start), step)
