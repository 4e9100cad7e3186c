"""`polytrain verify`: are the checkpoints of a run what was committed?"""

from __future__ import annotations

import click

from polytrain.output.echo import echo
from polytrain.view.cli.found import (
    FAILED,
    as_json,
    named_run,
    print_json,
    readable,
    run_argument,
)


@click.command("verify")
@run_argument
@as_json
def command(run: str, as_json: bool) -> int:
    """Read all checkpoints of RUN, and compare them with the hashes in their manifests.

    The exit code is 1 if one of them, or the run's journal, is damaged, or if the newest is
    missing. Older ones that are gone may have been deleted by CheckpointConfig.num_to_keep.
    """
    from polytrain.checkpoint.store import CheckpointStore

    found = named_run(run)
    journal = found.history.damage
    store = CheckpointStore(location=found.location)
    with readable(found.location):
        there = store.find(since_token=found.history.since_token)
        read = {each.directory: "; ".join(store.damage(each)) for each in there.manifests}
        differing = {directory: what for directory, what in read.items() if what}
        wrong = store.still_there({**there.damaged, **differing})
    newest = found.history.newest_commit
    missing = [newest.checkpoint] if newest and there.lacks(newest.checkpoint) else []
    intact = [directory for directory, what in read.items() if not what]
    if as_json:
        checkpoints = {"intact": intact, "damaged": wrong, "missing": missing}
        print_json("verify", {**checkpoints, "journal": str(journal) or None})
    else:
        if journal:
            echo(str(journal))
        for directory in intact:
            echo(f"intact   {directory}")
        for directory, what in wrong.items():
            echo(f"damaged  {directory}: {what}")
        for directory in missing:
            echo(f"missing  {directory}: the journal names it as the newest")
        counts = f"{len(intact)} intact, {len(wrong)} damaged"
        if missing:
            counts += f", {len(missing)} missing"
        echo(f"{counts}. The newest intact one: {intact[-1] if intact else 'none'}")
    return FAILED if wrong or missing or journal else 0
