"""The backend: options of the process group, or of a script that makes its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polytrain_plugins import (
    Backend,
    Capabilities,
    DatasetInfo,
    Demand,
    Device,
    Job,
    Problem,
    timeout_problems,
)
from polytrain_plugins.close_names import did_you_mean
from polytrain_torch.predictions.options import prediction_problems
from polytrain_torch.scripts.options import has_script, script_of, script_problems

if TYPE_CHECKING:
    from polytrain_torch.engine import TorchEngine

# With `torch` alone, each attempt would spend a second on DDP's imports.
_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "torch.utils.data.distributed",
    "torch.utils.serialization.config",
    "polytrain_torch.engine",
    "polytrain_torch.models.prepare",
)

_CLOSE = 0.7
"""Least similarity of a misspelt process group: a plugin of torch may have names of its own."""

_GROUPS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "ccl", "fake")
"""Process groups of torch and of well-known packages. Other packages may register more."""

_VALUE = r"^{name}\b[^=\n]*=\s*['\"]?([^'\"\n]*)"
"""A value in `torch/version.py`."""


@dataclass(frozen=True, kw_only=True)
class Torch(Backend):
    """A training function with a `torch.distributed` process group, or a script of `torchrun`."""

    name: ClassVar[str] = "torch"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(
        predictive=True, virtual_workers=True, devices=frozenset({Device.CPU, Device.GPU})
    )
    requires: ClassVar[dict[str, str]] = {"torch": "pip install 'polytrain[torch]'"}
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"process_group", "timeout_s", "script", "module", "args"}
    )
    prediction_batch_size: ClassVar[int | None] = 256
    mutable_prediction_options: ClassVar[frozenset[str]] = frozenset({"device"})

    process_group: str | None = None
    """Backend of the process group: "nccl", "gloo" or any other that torch knows. The default is
    nccl with `use_gpu`, and gloo without."""

    timeout_s: float = 1800.0
    """Seconds after which a collective operation fails if a peer doesn't join it."""

    script: str | os.PathLike[str] | None = None
    """A Python file that every worker runs in place of a training function, as under `torchrun`.
    The script, or a library that it uses, calls `torch.distributed.init_process_group()`."""

    module: str | None = None
    """A module that every worker runs, as `python -m` does, in place of a script."""

    args: Sequence[str | os.PathLike[str]] = ()
    """Command-line arguments of the script: its `sys.argv[1:]`."""

    def problems(self, job: Job) -> Iterable[Problem]:
        yield from timeout_problems(timeout_s=self.timeout_s)
        yield from script_problems(self, job)
        yield from _misspelt_group(self.process_group)
        if job.virtual_workers is not None and has_script(self):
            yield Problem(
                field="ScalingConfig.virtual_workers",
                what="a script of torchrun takes its own steps, once for each batch of a worker",
                remedy="Leave it out, or write a training function with prepare_model and "
                "micro_batches",
            )
        if self.process_group == "nccl" and not job.use_gpu:
            yield Problem(
                field="process_group",
                what="nccl needs GPUs",
                remedy="Use ScalingConfig(use_gpu=True), or leave it out to get gloo",
            )

        # On a cluster other nodes may have a different build; their workers check it.
        if job.use_gpu and job.is_in_this_environment:
            problem = cpu_build_problem()
            if problem is not None:
                yield problem

    def prediction_problems(
        self, options: Mapping[str, Any], data: DatasetInfo
    ) -> Iterable[Problem]:
        yield from prediction_problems(options, data)

    def demand(self, job: Job) -> Demand:
        return Demand(
            environment={
                # A check for GPUs must not initialise CUDA in the zygote: after that, forked
                # processes can't use a GPU.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
            preload=_PRELOAD,
            leader_ports=1,
        )

    def program(self, *, max_failures: int) -> Callable[[], None] | None:
        return script_of(self, max_failures=max_failures)

    def engine(self) -> TorchEngine:
        if has_script(self):
            from polytrain_torch.scripts.engine import ScriptEngine

            return ScriptEngine(self)
        from polytrain_torch.engine import TorchEngine

        return TorchEngine(self)


def _misspelt_group(given: Any) -> Iterator[Problem]:
    """Yield a problem if a name is close to that of a known process group."""
    if given is None:
        return
    if not isinstance(given, str):
        yield Problem(
            field="process_group",
            what=f"{given!r} is not a name",
            remedy='Give "gloo" or "nccl", or leave it out',
        )
        return
    # One backend for all devices, or one per device type: "cpu:gloo,cuda:nccl".
    for part in given.split(","):
        name = part.rpartition(":")[2].strip()
        meant = did_you_mean(name, _GROUPS, cutoff=_CLOSE)
        if meant and name not in _GROUPS:
            yield Problem(
                field="process_group",
                what=f"torch has no process group {name!r}",
                remedy=meant.strip(),
            )


def cpu_build_problem() -> Problem | None:
    """Return a problem if workers with GPUs can't use this environment's torch."""
    version = version_for_cpus_only()
    if version is None:
        return None
    return Problem(
        field="ScalingConfig.use_gpu",
        what=f"it is True, and torch {version} in this environment is built for CPUs only",
        remedy="Install a build of torch for GPUs in its place, or use use_gpu=False",
    )


def version_for_cpus_only() -> str | None:
    """Return the version of the installed torch if it can't use GPUs; None if it can.

    It is also None if torch isn't installed, or its build is unknown.
    """
    try:
        spec = find_spec("torch")
    except ValueError:  # a module without a spec stands in for torch
        return None
    for directory in (spec and spec.submodule_search_locations) or ():
        try:
            text = Path(directory, "version.py").read_text()
        except OSError:
            continue
        return version_of_cpu_build(text)
    return None


def version_of_cpu_build(text: str) -> str | None:
    """Return the version that `torch/version.py` names if it is built for CPUs only, else None."""
    version, cuda, hip = (
        re.search(_VALUE.format(name=name), text, re.MULTILINE)
        for name in ("__version__", "cuda", "hip")
    )
    if version is None or cuda is None or cuda[1] != "None":
        return None
    return version[1] if hip is None or hip[1] == "None" else None
