"""The class that a backend's author inherits, and the rules for subclasses."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from polytrain.testing.chaos import ChaosTier
from polytrain.testing.contract import ContractTier
from polytrain.testing.trainer import TrainerTier


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A standard test that fails for a known reason. If the test passes, that is a failure too."""

    reason: str
    raises: type[BaseException]


class BackendConformance(ContractTier, TrainerTier, ChaosTier):
    """Every test that a backend has to pass. Inherit, and set `backend`.

    Standard tests can't be removed or replaced. List one that is known to fail in
    `known_failures`, with its reason and its exception. You can add tests. `ContractTier` has only
    the quick tests, which don't start Ray.
    """

    known_failures: ClassVar[Mapping[str, KnownFailure]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if isinstance(given := vars(cls).get("backend"), type):
            raise TypeError(
                f"{cls.__name__}.backend is the class {given.__name__}. Give a backend with "
                f"options for the kit's data: backend = {given.__name__}(…)"
            )
        standard = _standard_tests()
        replaced = sorted(standard & vars(cls).keys())
        if replaced:
            raise TypeError(
                f"{cls.__name__} replaces standard tests: {', '.join(replaced)}. List a test that "
                "is known to fail in known_failures instead, with its reason."
            )
        unknown = sorted(cls.known_failures.keys() - standard)
        if unknown:
            raise TypeError(
                f"{cls.__name__}.known_failures names tests that don't exist: {', '.join(unknown)}."
            )
        for name, failure in cls.known_failures.items():
            marked = pytest.mark.xfail(strict=True, reason=failure.reason, raises=failure.raises)
            setattr(cls, name, marked(_copy(getattr(cls, name))))


def _standard_tests() -> set[str]:
    return {name for name in dir(BackendConformance) if name.startswith("test_")}


def _copy(function: types.FunctionType) -> types.FunctionType:
    """Copy a test, because a mark for one backend must not apply to other backends."""
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__doc__ = function.__doc__
    # pytest finds marks of the original class through that class.
    return copy
