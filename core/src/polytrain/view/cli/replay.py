"""`polytrain replay`: a stretch of a run again, compared with what the run has reported."""

from __future__ import annotations

from dataclasses import asdict

import click

from polytrain.output.echo import echo, echo_lines
from polytrain.view.cli.found import (
    FAILED,
    Refused,
    WholeNumber,
    as_json,
    named_run,
    print_json,
    run_argument,
)


@click.command(
    "replay",
    # What comes behind WHAT is a script's own.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--from",
    "from_step",
    type=WholeNumber(min=0),
    metavar="STEP",
    help="Start at the newest checkpoint up to this step; 0 starts where the run did.",
)
@click.option(
    "--steps", type=WholeNumber(min=1), metavar="N", help="Steps to compare (all that follow)."
)
@click.option("--storage", metavar="DIR", help="Where the replay's own files are (beside the run).")
@click.option(
    "--ignore", multiple=True, metavar="METRIC", help="A metric that may differ, such as a time."
)
@click.option("-m", "--module", is_flag=True, help="WHAT is a module, as for python -m.")
@as_json
@run_argument
@click.argument("what")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    from_step: int | None,
    steps: int | None,
    storage: str | None,
    ignore: tuple[str, ...],
    module: bool,
    as_json: bool,
    run: str,
    what: str,
    arguments: tuple[str, ...],
) -> int:
    """Train a stretch of RUN again, from one of its checkpoints, and compare each report. Nothing
    is written into the run.

    WHAT is what the run was trained with, as for `polytrain run`: a script with its ARGUMENTS,
    module:name or job.toml. Options come before RUN. The exit code is 1 if a report differs, and 2
    if WHAT isn't what the run was trained with.
    """
    from polytrain import CheckpointError, InvalidJobError, Result, TrainingFailedError
    from polytrain.view.cli.job_file import modules_beside_you
    from polytrain.view.cli.run import trainer_of
    from polytrain_plugins import RegistryError

    found = named_run(run)
    try:
        result = Result.from_path(found.location.address)
        with modules_beside_you():
            replay = result.replay(
                trainer_of(what, arguments, module=module, workers=found.history.world_size),
                from_step=from_step,
                steps=steps,
                storage_path=storage,
                ignore=ignore,
            )
    except (InvalidJobError, RegistryError, CheckpointError) as error:
        raise Refused(str(error)) from error
    except TrainingFailedError as error:
        echo_lines(str(error), err=True)
        return FAILED
    if as_json:
        print_json("replay", {**asdict(replay), "is_equal": replay.is_equal})
    else:
        echo(str(replay))
    return 0 if replay.is_equal else FAILED
