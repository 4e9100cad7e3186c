"""The command line: `polytrain`, or `python -m polytrain`."""

from __future__ import annotations

import logging
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    0: done. 1: it failed. 2: the command line or the job is wrong. 3: there is no such run. 75: the
    run was stopped or interrupted, and can be resumed. 130: the user has pressed Ctrl-C.

    Args:
        arguments: the command line without the program; by default this process's.
    """
    import click

    from polytrain.output.echo import PrintableFormatter, echo_lines
    from polytrain.view.cli.group import polytrain

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    try:
        code = polytrain.main(args=arguments, prog_name="polytrain", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        echo_lines(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        echo_lines(f"Error: {error.format_message()}", err=True)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            echo_lines(f"See: {error.ctx.command_path} --help", err=True)
        return error.exit_code
    except click.Abort:
        return 130
    return int(code or 0)
