"""The agent's end of a worker process's kept states, which it reads when the process is gone."""

from __future__ import annotations

import os

import msgpack

from polytrain.linux.kept_states import KeptState, KeptStates
from polytrain.workers.agents.calls import WriteState


class KeptEnd:
    """The small states that a worker process keeps, and the pipe that asks it for the whole."""

    def __init__(self, states: KeptStates, asking: int) -> None:
        self._states = states
        self._asking = asking
        self._request: int | None = None

    @classmethod
    def opened(cls, pid: int, kept: int, capacity: int, asking: int) -> KeptEnd | None:
        """Open both by their numbers in the process; return None if that isn't possible.

        Args:
            pid: the process, as this one knows it.
            kept: descriptor of the memory in the process.
            capacity: maximum bytes of a state.
            asking: descriptor of the pipe in the process.
        """
        own: list[int] = []
        try:
            own.append(os.open(f"/proc/{pid}/fd/{kept}", os.O_RDWR | os.O_CLOEXEC))
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            own.append(os.open(f"/proc/{pid}/fd/{asking}", flags))
            return cls(KeptStates(own[0], capacity), own[1])
        except (OSError, ValueError):
            # It has ended already, or its namespace hides it.
            for descriptor in own:
                os.close(descriptor)
            return None

    def read(self) -> tuple[KeptState, ...]:
        """Return the whole small states, oldest first."""
        return self._states.read()

    def ask(self, call: WriteState) -> None:
        """Ask the process for its whole state.

        Args:
            call: the driver's call.

        Raises:
            OSError: the process is gone, or the system has no descriptors left.
        """
        kept = {
            rank: [(state.point, state.is_forecast, state.content) for state in states]
            for rank, states in call.kept.items()
        }
        request = msgpack.packb((call.checkpoint, call.point, call.limit_s, kept))
        self._forget_request()
        # A pipe has no room for it: the process opens it by its number here.
        self._request = os.memfd_create("polytrain-survivor")
        with os.fdopen(self._request, "wb", closefd=False) as file:
            file.write(request)
        os.write(self._asking, b"%d %d\n" % (os.getpid(), self._request))

    def close(self) -> None:
        """Release all."""
        self._forget_request()
        self._states.close()
        os.close(self._asking)

    def _forget_request(self) -> None:
        if self._request is not None:
            os.close(self._request)
        self._request = None
