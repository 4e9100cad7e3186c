"""`polytrain conformance`: the tests that every backend has to pass, for an installed one."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from polytrain.view.cli.found import Refused

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
    help="An option of the backend, such as label=label: the kit's data have x, y and label.",
)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(name: str, settings: tuple[str, ...], arguments: tuple[str, ...]) -> int:
    """Run the conformance kit on the installed backend NAME; ARGUMENTS are pytest's.

    A test file of your own can list known failures: see the page "Write a backend".
    """
    from polytrain.view.cli.job_file import JobFileError, job_of
    from polytrain_plugins import RegistryError, load_backend

    if find_spec("pytest") is None:
        raise click.ClickException("the kit needs pytest: pip install pytest")
    try:
        load_backend(name)
        options = job_of("", settings)
    except (RegistryError, JobFileError) as error:
        raise Refused(str(error)) from error
    import pytest

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, f"test_{name}_conformance.py")
        title = "".join(part.title() for part in name.replace("-", "_").split("_"))
        file.write_text(_TESTS.format(name=name, title=title, options=options))
        return int(pytest.main([str(file), "--rootdir", directory, *arguments]))
