"""The commands, each imported when it is called: `--help` imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import click

from polytrain.output.echo import echo

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PLUGINS = "polytrain.commands"
"""Entry-point group of commands that other distributions add: each is a `click.Command`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """A command that isn't imported yet."""

    module: str
    help: str


COMMANDS: Mapping[str, Lazy] = {
    "run": Lazy(module="run", help="Train: a script, a trainer or a TOML job."),
    "runs": Lazy(module="runs", help="List the runs of a storage."),
    "show": Lazy(module="show", help="Show a run: state, attempts, times."),
    "report": Lazy(module="report", help="Write a run as one page."),
    "diff": Lazy(module="diff", help="Compare two runs."),
    "logs": Lazy(module="logs", help="Print what the ranks of a run have printed."),
    "stop": Lazy(module="stop", help="End an active run at its next checkpoint."),
    "stacks": Lazy(module="stacks", help="Print what the ranks are doing."),
    "verify": Lazy(module="verify", help="Compare checkpoints with their hashes."),
    "predict": Lazy(module="predict", help="Predict files by a run's model."),
    "sync": Lazy(module="sync", help="Send trackers what they lack of a run."),
    "backends": Lazy(module="backends", help="List the installed backends."),
    "doctor": Lazy(module="doctor", help="Try what runs need of this machine."),
    "conformance": Lazy(module="conformance", help="Test a backend."),
}


class LazyGroup(click.Group):
    """Lists commands by what is known of them, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(_plugins().keys() - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = COMMANDS.get(cmd_name)
        if known is not None:
            command: click.Command = import_module(f"{__package__}.{known.module}").command
            return command
        plugin = _plugins().get(cmd_name)
        return None if plugin is None else _loaded(plugin)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from polytrain.text.close_names import close_to

            near = close_to(args[0], self.list_commands(ctx))[:1]
            hint = "".join(f" Did you mean {name!r}?" for name in near)
            raise click.UsageError(f"{error.message}{hint}", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, known.help) for name, known in COMMANDS.items()]
        for name, plugin in sorted(_plugins().items()):
            owner = plugin.dist.name if plugin.dist is not None else plugin.value
            rows.append((name, f"Of {owner}."))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _plugins() -> dict[str, EntryPoint]:
    # Commands of our own are found without it.
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=PLUGINS)}


def _loaded(plugin: EntryPoint) -> click.Command:
    command = plugin.load()
    if isinstance(command, click.Command):
        return command
    raise click.ClickException(
        f"The command {plugin.name!r} ({plugin.value}) is a {type(command).__name__}. Let the "
        f"entry point of the group {PLUGINS} name a click.Command."
    )


def _print_version(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from importlib.metadata import version

        echo(f"polytrain {version('polytrain-core')}")
        context.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong command line, 3 there is no such run, 75 stopped "
    "or interrupted: fit() resumes it.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def polytrain() -> None:
    """Train, look at runs in any storage, and prepare this machine for them.

    A RUN is a run's directory or address, storage_path/name, or its name in ~/polytrain_results.
    """
