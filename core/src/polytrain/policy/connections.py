"""Decides whether an exception of a worker means a broken connection between nodes. Pure.

Where an exception comes from decides first: users' code has connections of its own, to databases
and web services, and their errors have the same words. The words decide the rest, because a
framework raises one type of exception for whatever goes wrong in its collective.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polytrain.data_errors import text_of

_NATIVE = re.compile(r"/gloo/transport/|collective/result\.cc|NCCL error")
"""Messages of collectives in native code. It may be called from any line, also from a user's."""

_BROKEN = re.compile(
    r"connection (?:was )?(?:abort(?:ed)?|closed|refused|reset|timed out)|broken pipe|"
    r"socket closed|peer closed|other end is likely closed|remote process exited|"
    r"NCCL error.*remote|no route to host|network is (?:down|unreachable)|"
    r"timed out waiting \d+ms|tasks are unhealthy|"
    # XGBoost: any failed call of a socket, with the system's words or without any.
    r"\[socket\.(?:h|cc):\d+",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL, the boosters' networks and gRPC when a peer or its connection is gone."""

_ALWAYS = frozenset({"DistNetworkError"})
"""Frameworks' exceptions that mean nothing else. torch's store raises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """The code that a backend's collective operations consist of."""

    engine: frozenset[str]
    """Packages of the backend's own modules, and modules of the collective that it may use."""

    frameworks: frozenset[str]
    """Names of the framework's packages."""

    @classmethod
    def of(
        cls, backend: object, frameworks: Iterable[str], collective: Iterable[str] = ()
    ) -> Origins:
        """Return the origins for a backend.

        Args:
            collective: the core's modules for backends whose collective isn't a framework's.
        """
        modules = {each.__module__ for each in type(backend).__mro__} - {"__main__"}
        return cls(
            engine=frozenset(module.rpartition(".")[0] or module for module in modules).union(
                collective
            ),
            frameworks=frozenset(map(_top, frameworks)),
        )


def is_broken_connection(error: BaseException, origins: Origins) -> bool:
    """Return whether an exception, or the one that it was raised from, is a broken connection."""
    cause: BaseException | None = error
    while cause is not None:
        if _is_of_connection(cause, origins):
            return True
        cause = cause.__cause__
    return False


def _is_of_connection(error: BaseException, origins: Origins) -> bool:
    modules = list(_modules(error))
    raised_in = modules[-1] if modules else ""
    is_of_framework = _top(type(error).__module__) in origins.frameworks
    if is_of_framework and type(error).__name__ in _ALWAYS:
        return True
    # Sockets of Python are the engine's if it has called the standard library. A framework has them
    # for downloads: its collectives are native code.
    own = [module for module in modules if _top(module) not in sys.stdlib_module_names]
    is_of_engine = bool(own) and any(_is_in(own[-1], package) for package in origins.engine)
    if is_of_engine and isinstance(error, ConnectionError):
        return True
    text = text_of(error)
    is_of_collective = (
        is_of_framework
        or is_of_engine
        or _top(raised_in) in origins.frameworks
        or _NATIVE.search(text) is not None
    )
    return is_of_collective and _BROKEN.search(text) is not None


def _modules(error: BaseException) -> Iterator[str]:
    """Yield the modules of an exception's frames, the innermost last."""
    entry = error.__traceback__
    while entry is not None:
        yield str(entry.tb_frame.f_globals.get("__name__"))
        entry = entry.tb_next


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _top(module: str) -> str:
    return module.partition(".")[0]
