"""The command line: `polytrain`, or `python -m polytrain`.

Each command is imported when it is called: `--help` imports none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import click

from polytrain.output.echo import PrintableFormatter, echo_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """A command that isn't imported yet."""

    module: str
    help: str
    function: str = "command"
    """Its name in the module."""


COMMANDS: Mapping[str, Lazy] = {
    "run": Lazy(module="run", help="Train: a script, a trainer or a TOML job."),
    "runs": Lazy(module="runs", help="List the runs of a storage."),
    "show": Lazy(module="show", help="Show a run: state, attempts, times."),
    "report": Lazy(module="report", function="report", help="Write a run as an HTML page."),
    "diff": Lazy(module="report", function="diff", help="Compare two runs."),
    "logs": Lazy(module="logs", help="Print what the ranks of a run have printed."),
    "stop": Lazy(
        module="asking", function="stop", help="End an active run at its next checkpoint."
    ),
    "stacks": Lazy(module="asking", function="stacks", help="Print the stacks of a run's ranks."),
    "verify": Lazy(module="verify", help="Compare checkpoints with their hashes."),
    "replay": Lazy(module="replay", help="Train a stretch of a run again, and compare."),
    "predict": Lazy(module="predict", help="Predict files with a run's model."),
    "sync": Lazy(module="sync", help="Send trackers the steps that they lack."),
    "backends": Lazy(module="backends", help="List the installed backends."),
    "doctor": Lazy(module="doctor", help="Check what runs need of this machine."),
    "new-backend": Lazy(module="new_backend", help="Write a backend to start from."),
    "conformance": Lazy(module="conformance", help="Test a backend."),
}


class LazyGroup(click.Group):
    """Lists commands by what is known of them, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        lazy = COMMANDS[cmd_name]
        module = import_module(f"{__package__}.{lazy.module}")
        command: click.Command = getattr(module, lazy.function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from polytrain_plugins.close_names import did_you_mean

            if args[0] == "help":
                help_ = " ".join([ctx.command_path, *args[1:2], "--help"])
                raise click.UsageError(f"{error.message} Type `{help_}`.", ctx) from error
            meant = did_you_mean(args[0], self.list_commands(ctx))
            raise click.UsageError(f"{error.message} {meant}".strip(), ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, known.help) for name, known in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong command line or job, 3 there is no such run, "
    "75 stopped or interrupted: fit() resumes it.",
)
@click.version_option(
    package_name="polytrain-core", message="polytrain %(version)s", help="Show the version."
)
def polytrain() -> None:
    """Train, look at runs in any storage, and prepare this machine for them.

    A RUN is a run's directory or address, storage_path/name, or its name in ~/polytrain_results.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    0: done. 1: it failed. 2: the command line or the job is wrong. 3: there is no such run. 75: the
    run was stopped or interrupted, and can be resumed. 130: the user has pressed Ctrl-C.

    Args:
        arguments: the command line without the program; by default this process's.
    """
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
    except Exception as error:
        from polytrain_plugins import PolytrainError

        if not isinstance(error, PolytrainError | OSError):
            raise
        echo_lines(f"Error: {error}", err=True)
        return 1
    return int(code or 0)
