"""What the last bits of results depend on: threads, processors, versions. Compared and recorded.

Virtual workers give the same bits only where all ranks, in all attempts, compute alike.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polytrain.extension import record_exactness

logger = logging.getLogger(__name__)

_NAMES = {
    "virtual_workers": "virtual workers",
    "threads": "threads of each worker",
    "torch": "torch's version",
    "instructions": "instructions that torch uses",
    "cpu": "CPU",
    "gpu": "GPU",
}

_FIXED = ("virtual_workers", "threads")
"""What certainly changes bits, and what the user sets."""


def arithmetic(virtual_workers: int) -> dict[str, Any]:
    """Return what this rank's results depend on."""
    return {
        "virtual_workers": virtual_workers,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "none",
    }


def warn_inexact(why_not: str) -> None:
    """Warn that the run may not be exact over world sizes, and record why, as a clause."""
    logger.warning("Exact over world sizes: no, %s.", why_not)
    record_exactness(why_not)


def compare_ranks(by_rank: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how the ranks differ in what their results depend on, as clauses.

    Raises:
        ValueError: they have different numbers of threads.
    """
    for name, what in _NAMES.items():
        values = [each[name] for each in by_rank]
        if len(set(values)) == 1:
            continue
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        text = f"rank 0 has {values[0]}, and rank {other} has {values[other]} ({what})"
        if name in _FIXED:
            raise ValueError(
                f"Virtual workers compute the same bits only alike: {text}. Give all the same, for "
                'example by ScalingConfig(resources_per_worker={"CPU": 1}).'
            )
        yield text


def check_resumed(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a checkpoint's results and this attempt's differ in what they depend on.

    `then` is None if the checkpoint was made without virtual workers.

    Raises:
        ValueError: the number of virtual workers or of threads is another one.
    """
    if then is None:
        logger.warning(
            "The checkpoint was made without virtual workers: from here on the run is the same at "
            "any number of workers, and wasn't before."
        )
        return
    for name, what in _NAMES.items():
        if then.get(name) == now[name]:
            continue
        text = f"{then.get(name)} when the checkpoint was made, and {now[name]} now ({what})"
        if name in _FIXED:
            remedy = (
                f"ScalingConfig(virtual_workers={then.get(name)})"
                if name == "virtual_workers"
                else f'ScalingConfig(resources_per_worker={{"CPU": {then.get(name)}}})'
            )
            raise ValueError(
                f"The run can't continue with the same bits: {text}. Resume with {remedy}."
            )
        yield text


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return "unknown" if found is None else found[1]
