"""Gets the report of the cluster's autoscaler from Ray."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from google.protobuf.json_format import MessageToDict
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from polytrain.policy.autoscaling import AutoscalerReport, report_of_v1, report_of_v2
from polytrain.ray_api.private import stored_status

logger = logging.getLogger(__name__)

# The module creates its classes on import, so type checkers don't know them.
_messages: Any = autoscaler_pb2

_STATUS_OF_V1 = "__autoscaling_status"

_FIRST_REPORT_S = 10.0
"""Seconds within which the autoscaler of a cluster that has just started reports."""

_PAUSE_S = 0.2


def autoscaler_report() -> AutoscalerReport | None:
    """Return the autoscaler's latest report; None if it hasn't reported."""
    try:
        status = stored_status(_STATUS_OF_V1)
        if status:
            return report_of_v1(json.loads(status))
        reply = _messages.GetClusterStatusReply()
        client: Any = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
        reply.ParseFromString(client.get_cluster_status(timeout_s=5.0))
    except (RayError, OSError, RuntimeError, ValueError) as error:
        logger.debug("Ray doesn't answer about its autoscaler: %s", error)
        return None
    state = reply.autoscaling_state
    if not state.autoscaler_state_version:
        return None
    return report_of_v2(MessageToDict(state, preserving_proto_field_name=True))


def can_add_nodes() -> bool:
    """Return whether the cluster may grow. Wait briefly if it has just started."""
    deadline = time.monotonic() + _FIRST_REPORT_S
    while (report := autoscaler_report()) is None and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return report is not None and report.adds_nodes
