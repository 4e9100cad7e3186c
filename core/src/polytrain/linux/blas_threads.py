"""OpenBLAS's number of threads, which it reads from variables only while it is loaded.

NumPy has a copy of OpenBLAS, and SciPy another. A zygote loads them without threads, to be able to
fork; a worker process is to have as many as if it had loaded them itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
"""The first that is set counts."""

_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix, suffix in product(("scipy_", ""), ("64_", "_64", ""))
)
"""Names of the function, which copies of OpenBLAS change to differ from each other."""


def start_blas_threads(environment: Mapping[str, str]) -> None:
    """Have each copy of OpenBLAS in this process start the threads that variables ask for."""
    threads = _threads(environment)
    if threads > 1:
        for library in _copies():
            for name in _SETTERS:
                if hasattr(library, name):
                    library[name](threads)


def _threads(environment: Mapping[str, str]) -> int:
    values = (environment.get(name, "") for name in _VARIABLES)
    numbers = [int(found[0]) for value in values if (found := re.match(r"\s*[1-9]\d*", value))]
    return min(numbers[0], len(os.sched_getaffinity(0))) if numbers else 1


def _copies() -> Iterator[ctypes.CDLL]:
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    for file in dict.fromkeys(re.findall(r"/.*openblas[^/\n]*$", maps, re.MULTILINE)):
        # It may be another file with such a name, or one that was deleted meanwhile. An error's
        # text has the name, which may be none.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield ctypes.CDLL(file)
