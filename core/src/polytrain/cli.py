"""The command line. Nothing is imported before it is known what is wanted."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    Args:
        arguments: the command line without the program; by default this process's.
    """
    parser = argparse.ArgumentParser(prog="python -m polytrain")
    commands = parser.add_subparsers(dest="command", required=True)
    warm = commands.add_parser(
        "warm",
        help="keep a process that has imported a framework, from which scripts start at once",
    )
    warm.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a backend, such as torch, or another installed module; without names, what is held",
    )
    warm.add_argument(
        "--minutes", type=_minutes, default=10.0, help="how long it stays after its last use (10)"
    )
    warm.add_argument(
        "--cpus-per-worker", type=int, default=1, help="as in the scripts' ScalingConfig (1)"
    )
    warm.add_argument("--status", action="store_true", help="show what is held")
    warm.add_argument("--stop", action="store_true", help="end all of them")
    options = parser.parse_args(arguments)
    if options.names and (options.stop or options.status):
        warm.error("--stop and --status take no names")
    from polytrain.api import warming

    if options.stop:
        return warming.stop()
    if not options.names:
        return warming.status()
    return warming.warm(
        options.names, kept_s=options.minutes * 60, cpus_per_worker=options.cpus_per_worker
    )


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} isn't a number of minutes above 0")
    return minutes
