"""`polytrain verify`: are the checkpoints of a run what was committed?"""

from __future__ import annotations

import click

from polytrain.output.echo import echo
from polytrain.view.cli.found import (
    FAILED,
    Unreadable,
    as_json,
    named_run,
    print_json,
    run_argument,
)


@click.command("verify")
@run_argument
@as_json
def command(run: str, as_json: bool) -> int:
    """Read all checkpoints of RUN, and compare them with the hashes in their manifests.

    The exit code is 1 if one of them, or the run's journal, is damaged.
    """
    from polytrain.checkpoint.store import CheckpointStore

    found = named_run(run)
    journal = found.history.damage
    store = CheckpointStore(location=found.location)
    try:
        there = store.find(since_token=found.history.since_token)
        wrong = dict(there.damaged)
        for manifest in there.manifests:
            if differences := store.damage(manifest):
                wrong[manifest.directory] = "; ".join(differences)
    except OSError as error:
        raise Unreadable(found.location, error) from error
    intact = [each.directory for each in there.manifests if each.directory not in wrong]
    if as_json:
        print_json("verify", {"intact": intact, "damaged": wrong, "journal": str(journal) or None})
    else:
        if journal:
            echo(str(journal))
        for directory in intact:
            echo(f"intact   {directory}")
        for directory, what in wrong.items():
            echo(f"damaged  {directory}: {what}")
        newest = intact[-1] if intact else "none"
        echo(f"{len(intact)} intact, {len(wrong)} damaged. The newest intact one: {newest}")
    return FAILED if wrong or journal else 0
