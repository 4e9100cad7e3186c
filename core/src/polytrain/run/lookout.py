"""What the controller does about ranks that don't meet, hang, hold others up, or don't leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from polytrain.config import FailureConfig
from polytrain.errors import Failure, stacks_text
from polytrain.policy.straggler import Straggler
from polytrain.run.events import DrainWanted, Event, Exited, Failed, Joined, Purpose
from polytrain.run.journal import Journal
from polytrain.run.pace import Pace
from polytrain.run.signs import Load, Overstayed, Sign
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
    _pace: Pace | None = None
    _moved: set[int] = field(default_factory=set)
    """Ranks that have been given another agent because they were stragglers."""

    def launched(self, generation: int, world_size: int) -> None:
        """A generation begins."""
        if self._pace is not None and self._pace.world_size != world_size:
            # They are other ranks now.
            self._moved.clear()
        self._pace = Pace(generation=generation, world_size=world_size)
        self._vigil = Vigil(config=self.config, generation=generation, world_size=world_size)

    @property
    def deadline(self) -> float | None:
        """When `look` may have something to say though nothing has happened."""
        return None if self._vigil is None else self._vigil.deadline

    def may_have_caused(self, event: Event) -> bool:
        """Whether a rank may have failed because it was paused to see why the others hang.

        Or because another has been stopped; either way it is not to blame.
        """
        vigil = self._vigil
        if vigil is None or not vigil.may_harm or not isinstance(event, Failed | Exited):
            return False
        return event.generation == vigil.generation

    def take(self, sign: Sign | Joined) -> DrainWanted | None:
        """Take note of something; return what the state machine is to be asked for."""
        if isinstance(sign, Load):
            return self._take_load(sign)
        vigil = self._vigil
        if vigil is not None:
            before = vigil.has_started
            vigil.take(sign, now=time.monotonic())
            if vigil.has_started and not before:
                self.journal.started(generation=vigil.generation)
        if isinstance(sign, Overstayed):
            self._warn(
                sign.generation,
                f"rank {sign.rank} has not ended within {sign.after_s:g} s after every rank was "
                "done, and was killed",
                {sign.rank: sign.stacks},
            )
        return None

    def look(self, state: State) -> Failure | None:
        """Do what there is to do now; return what ends the attempt."""
        finding = None if self._vigil is None else self._vigil.look(state, now=time.monotonic())
        match finding:
            case LookInto(pausing=pausing):
                self.group.look_into(state.generation, pausing=pausing)
            case Warned(reason=reason, stacks=stacks):
                self._warn(state.generation, reason, stacks, hint=_HINT)
            case Condemned(failure=failure):
                self.journal.looked_into(
                    generation=state.generation, reason=str(failure), stacks=failure.stacks
                )
                return failure
        return None

    def _take_load(self, load: Load) -> DrainWanted | None:
        found = [] if self._pace is None else self._pace.take(load)
        reasons = {its.rank: self._tell_of(its, load.generation) for its in found}
        if self.config.stragglers != "replace" or not reasons.keys() - self._moved:
            return None
        moved = frozenset(reasons.keys() - self._moved)
        self._moved |= moved
        reason = "; ".join(reasons[rank] for rank in sorted(moved))
        return DrainWanted(purpose=Purpose.MOVE, reason=reason, ranks=moved)

    def _tell_of(self, straggler: Straggler, generation: int) -> str:
        """Tell who holds the others up, everybody who is to know; return the reason."""
        host = self.group.members[straggler.rank].host
        reason = straggler.reason(host=host, window_s=self.config.straggler_window_s)
        self.journal.straggler(generation=generation, rank=straggler.rank, host=host, reason=reason)
        if self.config.stragglers == "report":
            hint = "FailureConfig(stragglers='replace') gives its place to a standby."
        elif straggler.rank in self._moved:
            hint = "It has been moved before: look at what it is given to do."
        else:
            hint = "A standby takes its place after the next checkpoint."
        logger.warning("%s", _sentences(reason, hint))
        return reason

    def _warn(
        self, generation: int, reason: str, stacks: Mapping[int, str], *, hint: str = ""
    ) -> None:
        self.journal.looked_into(generation=generation, reason=reason, stacks=stacks)
        told = stacks_text(stacks)
        logger.warning("%s What was being done:\n%s", _sentences(reason, hint), told)


def _sentences(reason: str, hint: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}. {hint}".strip()
