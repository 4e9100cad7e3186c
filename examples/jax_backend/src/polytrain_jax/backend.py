"""The backend: JAX needs a training function, and has no other training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polytrain_plugins import Backend, Capabilities, Demand, Job, Problem

if TYPE_CHECKING:
    from polytrain_jax.engine import JaxEngine


@dataclass(frozen=True, kw_only=True)
class Jax(Backend):
    """The processes of `jax.distributed`, on CPUs, and a training function that uses them."""

    name: ClassVar[str] = "jax"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities()
    requires: ClassVar[dict[str, str]] = {"jax": "pip install jax"}
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"timeout_s"})

    timeout_s: int = 300
    """Seconds that the workers may take to connect to each other."""

    def problems(self, job: Job) -> Iterable[Problem]:
        if not isinstance(self.timeout_s, int) or self.timeout_s <= 0:
            yield Problem(
                field="timeout_s",
                what=f"{self.timeout_s!r} is not a number of seconds",
                remedy="Give a whole number, more than 0",
            )

    def demand(self, job: Job) -> Demand:
        return Demand(
            environment={"JAX_PLATFORMS": "cpu"},
            preload=("jax", "jax.numpy", "polytrain_jax.engine"),
            leader_ports=1,
        )

    def engine(self) -> JaxEngine:
        from polytrain_jax.engine import JaxEngine

        return JaxEngine(self)
