"""Optional libraries, which users install if they need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(library: str) -> Iterator[None]:
    """Import a library inside this.

    Raises:
        ModuleNotFoundError: it isn't installed; the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ModuleNotFoundError(
            f"polytrain_torch.{library} needs {library}, which isn't installed: "
            f"pip install {library}",
            name=library,
        ) from None
