"""The driver half: options of the process group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polytrain_plugins import Backend, Capabilities, Demand, Device, Job, Problem

if TYPE_CHECKING:
    from polytrain_torch.engine import TorchEngine

# `torch` alone leaves the second that building DDP takes to import to every attempt.
_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "torch.utils.data.distributed",
    "torch.utils.serialization.config",
    "polytrain_torch.engine",
    "polytrain_torch.prepare",
)


@dataclass(frozen=True, kw_only=True)
class Torch(Backend):
    """A `torch.distributed` process group, and a training function that uses it."""

    name: ClassVar[str] = "torch"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(devices=frozenset({Device.CPU, Device.GPU}))
    requires: ClassVar[dict[str, str]] = {"torch": "pip install 'polytrain[torch]'"}
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"process_group", "timeout_s"})

    process_group: str | None = None
    """Backend of the process group: "nccl", "gloo" or another that torch knows; by default nccl
    with `use_gpu` and gloo without."""

    timeout_s: float = 1800.0
    """Seconds after which a collective operation whose peers don't come gives up."""

    def problems(self, job: Job) -> Iterable[Problem]:
        if not isinstance(self.timeout_s, int | float) or self.timeout_s <= 0:
            yield Problem(
                field="timeout_s",
                what=f"{self.timeout_s!r} is not a time",
                remedy="Give seconds, more than 0",
            )
        if self.process_group == "nccl" and not job.use_gpu:
            yield Problem(
                field="process_group",
                what="nccl needs GPUs",
                remedy="Use ScalingConfig(use_gpu=True), or leave it out to get gloo",
            )

    def demand(self, job: Job) -> Demand:
        return Demand(
            environment={
                # Asking whether there is a GPU must not initialise the driver in the zygote:
                # a process forked from it could not use one any more.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
            preload=_PRELOAD,
        )

    def engine(self) -> TorchEngine:
        from polytrain_torch.engine import TorchEngine

        return TorchEngine(self)
