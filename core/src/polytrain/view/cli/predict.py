"""`polytrain predict`: predictions of a run's model, into Parquet files."""

from __future__ import annotations

import click

from polytrain.output.echo import echo
from polytrain.view.cli.found import Refused, WholeNumber, named_run, run_argument


@click.command("predict")
@run_argument
@click.argument("data", nargs=-1, required=True)
@click.option("-o", "--output", required=True, help="A directory or address for the predictions.")
@click.option(
    "--keep", multiple=True, metavar="COLUMN", help="A column to copy beside the predictions."
)
@click.option("--best", is_flag=True, help="Use the best checkpoint, not the newest.")
@click.option(
    "-w",
    "--workers",
    type=WholeNumber(min=0),
    metavar="N",
    help="Number of workers; by default one for each CPU.",
)
@click.option(
    "--transform", metavar="MODULE:NAME", help="The function that transformed the training data."
)
@click.option("--transformed", is_flag=True, help="DATA has been transformed already.")
def command(
    run: str,
    data: tuple[str, ...],
    output: str,
    keep: tuple[str, ...],
    best: bool,
    workers: int | None,
    transform: str | None,
    transformed: bool,
) -> None:
    """Predict the rows of DATA (files, directories or addresses) with the model of RUN.

    If it is killed, the same command resumes it.
    """
    found = named_run(run)
    from polytrain import InvalidJobError, load
    from polytrain.view.cli.job_file import imported, modules_beside_you

    try:
        with modules_beside_you():
            load(found.location.address).predict(
                list(data) if len(data) > 1 else data[0],
                checkpoint="best" if best else "newest",
                output=output,
                keep=keep,
                num_workers=workers,
                transform=None if transform is None else imported(transform),
                transformed=transformed,
            )
    except InvalidJobError as error:
        raise Refused(str(error)) from error
    echo(f"The predictions are in {output}.")
