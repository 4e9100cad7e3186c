"""A process that runs tests keeps more zygotes than a user's: its runs need many different ones.

Frameworks, numbers of threads, and runs with and without data take turns. A zygote that had to go
in between would import its framework again, for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polytrain.workers.processes import cache

AT_MOST = 6
"""Each has a framework in its memory, and as many as tests run at once keep theirs."""

FOR_S = 600.0

UNIT = Path(__file__).parent / "unit"


@pytest.fixture(scope="module", autouse=True)
def many_zygotes_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep them, except for unit tests: those of the cache have it as users have."""
    with pytest.MonkeyPatch.context() as patch:
        if UNIT not in request.path.parents:
            patch.setattr(cache, "_KEPT_AT_MOST", AT_MOST)
            patch.setattr(cache, "_KEPT_S", FOR_S)
        yield
