"""Has TensorBoard drop what a restart repeats, in event files that a library's logger writes."""

from __future__ import annotations

from typing import Any

from polytrain_torch.private import add_event


def drop_events(writer: Any, step: int) -> None:
    """Mark that the events of this step and later ones are logged again.

    Args:
        writer: a `SummaryWriter` of torch or tensorboardX.
        step: the first step that is repeated.
    """
    if type(writer).__module__.startswith("tensorboardX"):
        from tensorboardX.proto import event_pb2
    else:
        from tensorboard.compat.proto import event_pb2
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    add_event(writer, event_pb2.Event(session_log=start), step)
