"""What the controller does about ranks that don't meet, hang, or don't leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from polytrain.config import FailureConfig
from polytrain.errors import Failure, stacks_text
from polytrain.run.events import Joined
from polytrain.run.journal import Journal
from polytrain.run.signs import Overstayed, Sign
from polytrain.run.states import State
from polytrain.run.vigil import Condemned, LookInto, Vigil, Warned
from polytrain.workers.group import WorkerGroup

_HINT = (
    "polytrain.heartbeat() tells that a rank goes on; what becomes of one that doesn't is up to "
    "FailureConfig(hang_timeout_s=…, hang_action=…)."
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Lookout:
    """Watches over one generation after another."""

    config: FailureConfig
    group: WorkerGroup
    journal: Journal
    _vigil: Vigil | None = None

    def launched(self, generation: int, world_size: int) -> None:
        """A generation begins."""
        self._vigil = Vigil(config=self.config, generation=generation, world_size=world_size)

    @property
    def deadline(self) -> float | None:
        """When `look` may have something to say though nothing has happened."""
        return None if self._vigil is None else self._vigil.deadline

    def take(self, sign: Sign | Joined) -> None:
        """Take note of something."""
        if self._vigil is not None:
            self._vigil.take(sign, now=time.monotonic())
        if isinstance(sign, Overstayed):
            self._warn(
                sign.generation,
                f"rank {sign.rank} has not ended within {sign.after_s:g} s after every rank was "
                "done, and was killed",
                {sign.rank: sign.stacks},
            )

    def look(self, state: State) -> Failure | None:
        """Do what there is to do now; return what ends the attempt."""
        finding = None if self._vigil is None else self._vigil.look(state, now=time.monotonic())
        match finding:
            case LookInto():
                self.group.look_into(state.generation)
            case Warned(reason=reason, stacks=stacks):
                self._warn(state.generation, reason, stacks, hint=_HINT)
            case Condemned(failure=failure):
                self.journal.looked_into(
                    generation=state.generation, reason=str(failure), stacks=failure.stacks
                )
                return failure
        return None

    def _warn(
        self, generation: int, reason: str, stacks: Mapping[int, str], *, hint: str = ""
    ) -> None:
        self.journal.looked_into(generation=generation, reason=reason, stacks=stacks)
        told = f"{reason[0].upper()}{reason[1:]}. {hint}".strip()
        logger.warning("%s What was being done:\n%s", told, stacks_text(stacks))
