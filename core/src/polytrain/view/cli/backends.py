"""`polytrain backends`: the installed backends, and whether their frameworks are there."""

from __future__ import annotations

from typing import Any

import click

from polytrain.output.echo import echo
from polytrain.view.cli.found import as_json, print_json


@click.command("backends")
@as_json
def command(as_json: bool) -> int:
    """List the installed backends. The exit code is 1 if one can't be used."""
    from polytrain_plugins import backend_names

    rows = [_row(name) for name in backend_names()]
    if as_json:
        print_json("backends", rows)
    else:
        for row in rows:
            frameworks = ", ".join(f"{n} {v}" for n, v in row["frameworks"].items() if v)
            echo(f"{row['name']:<12} {row['problem'] or frameworks or 'ready'}")
    return int(any(row["problem"] for row in rows))


def _row(name: str) -> dict[str, Any]:
    from polytrain.api.backend_checks import missing_modules
    from polytrain_plugins import RegistryError, load_backend

    try:
        backend = load_backend(name)
    except RegistryError as error:
        return {"name": name, "frameworks": {}, "problem": str(error)}
    modules = backend.requires
    missing = missing_modules(modules)
    return {
        "name": name,
        "frameworks": {module: _version(module) for module in modules},
        "problem": "; ".join(f"{n} is missing: {remedy}" for n, remedy in missing.items()),
    }


def _version(module: str) -> str | None:
    from importlib.metadata import packages_distributions, version

    # The module xgboost may be of the distribution xgboost-cpu.
    of = packages_distributions().get(module)
    return version(of[0]) if of else None
