"""`polytrain stacks`: what the ranks of an active run are doing."""

from __future__ import annotations

import click

from polytrain.output.echo import echo_lines
from polytrain.view.cli.found import WholeNumber, as_json, named_run, print_json, run_argument


@click.command("stacks")
@run_argument
@click.option("--rank", type=WholeNumber(min=0), metavar="N", help="Only this rank's.")
@as_json
def command(run: str, rank: int | None, as_json: bool) -> None:
    """Print the stacks of all threads of RUN's worker processes, which aren't paused for it."""
    from polytrain.run.requests import RequestKind
    from polytrain.view.cli.asking import ask_driver

    found = named_run(run)
    stacks = ask_driver(found, RequestKind.STACKS).get("stacks")
    if not stacks:
        raise click.ClickException(f"{found.location.name} has no worker processes at the moment")
    if rank is not None:
        if str(rank) not in stacks:
            raise click.ClickException(
                f"--rank: there is no rank {rank}. There are: {', '.join(stacks)}"
            )
        stacks = {str(rank): stacks[str(rank)]}
    if as_json:
        print_json("stacks", stacks)
    else:
        texts = (f"Rank {number}:\n{text.rstrip()}" for number, text in stacks.items())
        echo_lines("\n\n".join(texts))
