"""The kit over backends of which one method is broken: it names each mistake.

Not collected by itself: its failures are the point. See `test_broken_methods.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from polytrain_mylib import Mylib
from tests.conformance import broken_methods

from polytrain.testing import ContractTier, TrainerTier


def _all_below(backend: type[Mylib]) -> Iterator[type[Mylib]]:
    for each in backend.__subclasses__():
        yield each
        yield from _all_below(each)


for _backend in _all_below(Mylib):
    if _backend is not broken_methods.WithABrokenEngine:
        globals()[f"Test{_backend.__name__}"] = type(
            f"Test{_backend.__name__}",
            (ContractTier, TrainerTier),
            {"backend": _backend(rounds=8, label="label"), "__module__": __name__},
        )
