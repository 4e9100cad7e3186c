"""Arguments of Ray Train's configurations: their order, and which polytrain doesn't have."""

from __future__ import annotations

from typing import Any

from polytrain.config.call_forms import Absent

_REMOVED = "Leave it out: Ray Train has removed it too"

SCALING: dict[str, Any] = {
    "order": (
        "trainer_resources",
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "placement_strategy",
        "accelerator_type",
        "label_selector",
        "use_tpu",
        "topology",
        "elastic_resize_monitor_interval_s",
    ),
    "absent": {
        "trainer_resources": Absent(
            instead="Leave it out: a run is driven by the process that calls fit()"
        ),
        "use_tpu": Absent(
            default=False,
            instead='Reserve the chips by their resource: resources_per_worker={"TPU": 4}',
        ),
        "topology": Absent(
            instead="Leave it out. To choose the nodes of one slice, use label_selector with the "
            "labels that they have"
        ),
        "elastic_resize_monitor_interval_s": Absent(
            default=60.0,
            instead="A run grows as soon as the cluster has room",
            is_harmless=True,
        ),
    },
}

FAILURE: dict[str, Any] = {
    "order": (
        "max_failures",
        "fail_fast",
        "controller_failure_limit",
        "max_preemption_failures",
        "relax_collectives_on_preemption",
        "preemption_grace_s",
    ),
    "absent": {
        "fail_fast": Absent(default="DEPRECATED", instead=_REMOVED),
        "controller_failure_limit": Absent(
            default=-1,
            instead="There is no controller process; ScalingConfig.start_timeout_s limits the "
            "wait for resources",
            is_harmless=True,
        ),
        "max_preemption_failures": Absent(
            default=-1, instead="Leave it out: preemptions never count as failures"
        ),
        "relax_collectives_on_preemption": Absent(
            default=False,
            instead="Leave it out: before a preemption all ranks make a checkpoint together",
        ),
        "preemption_grace_s": Absent(
            default=0.0,
            instead="All ranks end together, once their checkpoint is committed",
            is_harmless=True,
        ),
    },
}

CHECKPOINT: dict[str, Any] = {
    "order": (
        "num_to_keep",
        "checkpoint_score_attribute",
        "checkpoint_score_order",
        "checkpoint_frequency",
        "checkpoint_at_end",
    ),
    "absent": {
        "checkpoint_at_end": Absent(
            default=True,
            instead="Training without a training function always saves at its end",
            is_harmless=True,
        ),
    },
}

RUN: dict[str, Any] = {
    "order": (
        "name",
        "storage_path",
        "storage_filesystem",
        "failure_config",
        "checkpoint_config",
        "callbacks",
        "worker_runtime_env",
        "logging_config",
        "sync_config",
        "verbose",
        "stop",
        "progress_reporter",
        "log_to_file",
    ),
    "absent": {
        "logging_config": Absent(
            instead='logging.getLogger("polytrain").setLevel(…) sets the level',
            is_harmless=True,
        ),
        "sync_config": Absent(default="DEPRECATED", instead=_REMOVED),
        "verbose": Absent(
            default="DEPRECATED", instead="Use progress=False for less output", is_harmless=True
        ),
        "progress_reporter": Absent(default="DEPRECATED", instead="Use observers=(…,)"),
        "log_to_file": Absent(
            default="DEPRECATED",
            instead="The run's directory has a log of each rank",
            is_harmless=True,
        ),
    },
}

DATA: dict[str, Any] = {
    "order": ("datasets_to_split", "execution_options", "enable_shard_locality"),
    "absent": {
        "execution_options": Absent(
            instead="Set them on the Ray data set itself: dataset.context.execution_options"
        ),
        "enable_shard_locality": Absent(
            default=True,
            instead="Which worker reads which rows doesn't depend on their nodes",
            is_harmless=True,
        ),
    },
}

VALIDATION: dict[str, Any] = {"order": ("fn", "task_config", "ray_remote_kwargs"), "absent": {}}

VALIDATION_TASK: dict[str, Any] = {"order": ("fn_kwargs", "timeout_s"), "absent": {}}
