"""Commands that install polytrain: from its checkout, if it was installed from one."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(command: str) -> str:
    """Return a command that works here.

    Args:
        command: as for the released distribution, such as `pip install 'polytrain[torch]'`.
    """
    checkout = _checkout()
    return command if checkout is None else command.replace("'polytrain[", f"'{checkout}[")


@lru_cache(maxsize=1)
def _checkout() -> str | None:
    """The directory that this distribution was installed from; None if from an index."""
    try:
        # PEP 610: written by every installer.
        recorded = distribution("polytrain-plugins").read_text("direct_url.json")
        url = urlsplit(json.loads(recorded or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError):
        return None
    root = Path(unquote(url.path)).parent
    is_checkout = url.scheme == "file" and (root / ".ci" / "hatch_metadata.py").is_file()
    return str(root) if is_checkout else None
