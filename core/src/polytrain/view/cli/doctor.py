"""`polytrain doctor`: checks what runs need, and says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import click

from polytrain.output.echo import echo
from polytrain.storage import DEFAULT_STORAGE
from polytrain.view.cli.found import as_json, print_json, storage_at
from polytrain.view.doctor.finding import Finding, Verdict, checked, failed_with


@click.command("doctor")
@click.option(
    "--storage",
    default=DEFAULT_STORAGE,
    show_default=True,
    help="The directory or address where you want to store runs.",
)
@click.option(
    "--backend", "backends", multiple=True, help="Only these; all installed ones by default."
)
@click.option(
    "--nodes",
    type=click.Choice(["this", "all"]),
    default="this",
    show_default=True,
    help="Check this machine, or every node of the Ray cluster too.",
)
@as_json
def command(storage: str, backends: tuple[str, ...], nodes: str, as_json: bool) -> int:
    """Check what runs need of this machine, a storage and the backends.

    The exit code is 1 if something failed.
    """
    _refuse_unknown(backends)
    findings = []
    for finding in _findings(storage, backends, all_nodes=nodes == "all"):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print_json("doctor", [asdict(finding) for finding in findings])
    failed = sum(finding.verdict is Verdict.FAILED for finding in findings)
    if not as_json:
        echo(f"{len(findings)} checks, {failed} failed.")
    return 1 if failed else 0


def _refuse_unknown(backends: tuple[str, ...]) -> None:
    from polytrain_plugins import RegistryError, UnknownBackendError, load_backend

    for name in backends:
        try:
            load_backend(name)
        except UnknownBackendError as error:
            raise click.UsageError(f"--backend: {error}") from error
        except RegistryError:
            # Its own check says why it can't be loaded.
            continue


def _findings(storage: str, backends: tuple[str, ...], *, all_nodes: bool) -> Iterator[Finding]:
    from polytrain.view.doctor import machine, stored, worlds
    from polytrain_plugins import backend_names

    location = storage_at(storage, "--storage")
    names = backends or tuple(name for name in backend_names() if name != "reference")
    checks: dict[str, Callable[[], str]] = {
        **machine.CHECKS,
        **stored.checks_of(location),
        **{f"backend {name}": partial(worlds.backend, name) for name in names},
    }
    for name, check in checks.items():
        yield checked(name, check)
    if all_nodes:
        from polytrain.view.doctor.links import transports_of
        from polytrain.view.doctor.nodes import findings_of_nodes

        try:
            yield from findings_of_nodes(location, transports_of(names))
        except Exception as error:  # whatever Ray or the storage raises is what the user wants
            yield failed_with("nodes", error)


def _print(finding: Finding) -> None:
    echo(f"{finding.verdict:<8} {finding.check}: {finding.what}")
    if finding.remedy:
        echo(f"{'':<8} → {finding.remedy}")
