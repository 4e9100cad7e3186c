"""A process that runs tests keeps more zygotes than a user's: its runs need many different ones.

Frameworks, and libraries on top of them, take turns. A zygote that had to go in between would
import its framework again, for seconds.

Runs with and without data, predictions and the kit's processes would each have a zygote of their
own for a framework. Here all zygotes have the modules of all of these, so that they share one. All
runs with a library on top of torch share another one, which has all of these libraries.

A home directory of a test's own, examples on `sys.path`, or variables that a library sets when this
process imports it, take no other zygote: what is imported before a fork needs none of them, and a
worker process gets its run's.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from polytrain.workers.agents.agent_spec import PRELOAD, PRELOAD_WITH_DATA
from polytrain.workers.processes import cache, pool, zygote_connection
from polytrain.workers.processes.cache import KeptZygote
from polytrain.workers.processes.zygote_connection import ZygoteSpec

AT_MOST = 8
"""Each has a framework in its memory, and as many as tests run at once keep theirs."""

FOR_S = 3600.0

ANSWERS_WITHIN_S = 10.0
"""On a busy machine it is cheaper to wait for a zygote than to import all of it again."""

IN_ALL = (
    *(*PRELOAD, *PRELOAD_WITH_DATA, "pyarrow.pandas_compat"),
    *("polytrain.prediction.predictor", "polytrain.testing.local_rank"),
    *("pytest", "polytrain.api.trainer", "polytrain.api.result"),
)
"""They take half a second to import, a framework up to four. The last three are imported by tests'
modules, and so by the workers that run functions of these: for longer than most of these run."""

_TORCH = (
    *("torch", "torch.distributed", "torch.nn.parallel.distributed", "torch._dynamo"),
    *("torch.utils.data.distributed", "torch.utils.serialization.config"),
    *("polytrain_torch.engine", "polytrain_torch.models.prepare"),
    # Those that keep and save states import these at first, in each worker, for most of a second.
    *("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.checkpoint._fsspec_filesystem", "torch.distributed.tensor.debug"),
    *("torch.profiler._cupti_monitor", "polytrain_torch.survivors.keeper"),
    *("polytrain_torch.checkpoints.read_back", "polytrain_torch.checkpoints.sharded"),
)

_LIBRARIES = (
    *("keras_on_torch", "deepspeed_without_mlflow"),
    # The optimizer of each engine imports it.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    *("lightning", "transformers", "torchmetrics", "datasets", "peft", "sklearn.datasets"),
    *("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"),
    *("polytrain_torch.accelerate", "polytrain_torch.deepspeed", "polytrain_torch.horovod"),
    *("polytrain_torch.lightning", "polytrain_torch.transformers", "polytrain_tf.reporting"),
)

_BOOSTERS = (
    *("xgboost", "xgboost.tracker", "xgboost.collective", "polytrain_xgboost.engine"),
    *("lightgbm", "polytrain_lightgbm.engine"),
)

FAMILIES = (_BOOSTERS, _TORCH, _LIBRARIES)
"""Who needs one of these modules gets all of its family."""

PRELOADED = str(Path(__file__).parent / "e2e/preloaded")
"""Modules that only zygotes of tests import."""

OF_NO_EFFECT = (
    *("DS_ACCELERATOR", "ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH", "HOME", "KMP_"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TF2_BEHAVIOR", "TF_CPP_MIN_LOG_LEVEL", "TPU_"),
    *("TORCHINDUCTOR_CACHE_DIR", "_MLFLOW_", "_RJEM_", "PYTHONBREAKPOINT"),
)
"""Prefixes of variables that may differ."""

EXAMPLES = str(Path(__file__).parents[1] / "examples")

UNIT = Path(__file__).parent / "unit"


@pytest.fixture(scope="module", autouse=True)
def many_zygotes_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep them, except for unit tests: those of the cache have it as users have."""
    with pytest.MonkeyPatch.context() as patch:
        if UNIT not in request.path.parents:
            patch.setattr(cache, "_KEPT_AT_MOST", AT_MOST)
            patch.setattr(cache, "_KEPT_S", FOR_S)
            patch.setattr(cache, "_OF_NO_EFFECT", (*cache._OF_NO_EFFECT, *OF_NO_EFFECT))
            patch.setattr(zygote_connection, "_ANSWER_S", ANSWERS_WITHIN_S)
            patch.setattr(pool, "_NODE", socket.gethostname())
            for user in ("driver.agent_group", "processes.pool"):
                name = f"polytrain.workers.{user}.kept_or_new_zygote"
                patch.setattr(name, kept_or_new_zygote)
        yield


def kept_or_new_zygote(spec: ZygoteSpec, node_id: str) -> KeptZygote:
    """Return a kept zygote, or start one, that has at least the modules that are asked for."""
    families = (family for family in FAMILIES if not set(family).isdisjoint(spec.modules))
    modules = tuple(dict.fromkeys(chain(IN_ALL, *families, spec.modules)))
    path = (PRELOADED, *(place for place in spec.path if place not in (PRELOADED, EXAMPLES)))
    return cache.kept_or_new_zygote(replace(spec, modules=modules, path=path), node_id)
