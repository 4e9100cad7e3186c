"""`polytrain conformance`: the tests that every backend has to pass, for an installed one."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo_lines
from polytrain.view.cli.found import Refused, print_json
from polytrain.view.cli.new_backend import class_name

if TYPE_CHECKING:
    from polytrain.testing.card import Capability, Card

_TESTS = """\
from polytrain.testing import BackendConformance
from polytrain_plugins import load_backend


class Test{title}(BackendConformance):
    backend = load_backend("{name}")(**{options!r})
"""


@click.command("conformance", context_settings={"ignore_unknown_options": True})
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="OPTION=VALUE",
    help="An option of the backend, with a value of TOML or a string, such as label=label: the "
    "kit's data have the columns x0, x1, x2 and label.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "badge"]),
    default="table",
    help="What comes at the end: a table, or all on stdout, as JSON or as JSON of a shields.io "
    "badge.",
)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(name: str, settings: tuple[str, ...], format_: str, arguments: tuple[str, ...]) -> int:
    """Run the conformance kit on the installed backend NAME; ARGUMENTS are pytest's.

    At the end comes a card: which capabilities the backend claims and holds, the faults that it has
    survived, and the times. A test file of your own can list known failures: see the page "Write a
    backend".
    """
    from polytrain.api.backend_checks import missing_options, raise_if_any, unknown_options
    from polytrain.view.cli.job_file import job_of
    from polytrain_plugins import InvalidJobError, RegistryError, load_backend

    if find_spec("pytest") is None:
        raise click.ClickException("the kit needs pytest: pip install pytest")
    try:
        backend = load_backend(name)
        options = job_of("", settings)
        raise_if_any(
            (
                *unknown_options(backend, options, (), has_function=False),
                *missing_options(backend, options),
            )
        )
    except (RegistryError, InvalidJobError) as error:
        raise Refused(str(error)) from error
    import pytest

    from polytrain.testing.outcomes import Outcomes

    outcomes = Outcomes()
    # What pytest prints is for people, also where a program reads the card.
    shown = sys.stdout if format_ == "table" else sys.stderr
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(shown):
        file = Path(directory, f"test_{name}_conformance.py")
        title = class_name(name.replace("-", "_"))
        file.write_text(_TESTS.format(name=name, title=title, options=options))
        code = int(pytest.main([str(file), "--rootdir", directory, *arguments], [outcomes]))
    if outcomes.by_test:
        from polytrain.testing.card import card

        _print(card(backend, outcomes.by_test), format_)
    return code


def _print(found: Card, format_: str) -> None:
    if format_ == "json":
        print_json("conformance", {**asdict(found), "conforms": found.conforms})
    elif format_ == "badge":
        import json

        echo_lines(json.dumps(badge(found)))
    else:
        echo_lines("\n".join(table(found)))


def badge(found: Card) -> dict[str, Any]:
    """Return a card as an endpoint badge of shields.io."""
    wrong = len(found.failed)
    return {
        "schemaVersion": 1,
        "label": "polytrain conformance",
        "message": f"{wrong} failed"
        if wrong
        else f"{found.tests.get('passed', 0)} passed, {found.survived} faults survived",
        "color": "brightgreen" if found.conforms else "red",
    }


def table(found: Card) -> Iterator[str]:
    """Yield a card's lines."""
    yield ""
    yield f"{found.backend:<18}{'claimed':<14}held"
    for name, each in found.capabilities.items():
        yield f"{name:<18}{_claimed(each):<14}{_held(each)}".rstrip()
    yield ""
    if found.faults:
        yield f"{'faults':<18}{found.survived} of {found.faults} survived{_recovery(found)}"
    ends = ", ".join(f"{count} {end}" for end, count in found.tests.items())
    yield f"{'tests':<18}{ends}"
    times = ", ".join(f"{tier} {seconds:.1f} s" for tier, seconds in found.seconds.items())
    yield f"{'times':<18}{times}"


def _claimed(each: Capability) -> str:
    if isinstance(each.claimed, bool):
        return "yes" if each.claimed else "no"
    return ", ".join(each.claimed) if isinstance(each.claimed, list) else str(each.claimed)


def _held(each: Capability) -> str:
    if each.held == "not claimed":
        return ""
    return f"{each.held}: {', '.join(each.failed)}" if each.failed else str(each.held)


def _recovery(found: Card) -> str:
    if found.recovery_s is None:
        return ""
    usual, worst = found.recovery_s
    return f"; next report after {usual:.2f} s (median), {worst:.2f} s (worst)"
