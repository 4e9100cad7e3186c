"""`polytrain warm`: keeps processes that have imported frameworks."""

from __future__ import annotations

import math

import click


def _minutes(context: click.Context, option: click.Parameter, minutes: float) -> float:
    if not 0 < minutes < math.inf:
        raise click.BadParameter(f"{minutes:g} isn't a number of minutes above 0")
    return minutes


@click.command("warm")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--minutes",
    type=float,
    callback=_minutes,
    default=10.0,
    help="How long it stays after its last use (10).",
)
@click.option(
    "--cpus-per-worker", type=int, default=1, help="As in the scripts' ScalingConfig (1)."
)
@click.option("--status", is_flag=True, help="Show what is held.")
@click.option("--stop", is_flag=True, help="End all of them.")
def command(
    names: tuple[str, ...], minutes: float, cpus_per_worker: int, status: bool, stop: bool
) -> int:
    """Keep a process that has imported backends or modules, from which scripts start at once.

    NAME is a backend, such as torch, or another module. Without names, what is held is shown.
    """
    if names and (stop or status):
        raise click.UsageError("--stop and --status take no names")
    from polytrain.api import warming

    if stop:
        return warming.stop()
    if not names:
        return warming.status()
    return warming.warm(names, kept_s=minutes * 60, cpus_per_worker=cpus_per_worker)
