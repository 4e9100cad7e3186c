"""Process 1 of a host: with it, the host ends. It ends when the owner of the hosts does.

A script: it runs by its path, and imports nothing of polytrain, so that it starts in milliseconds.
"""

from __future__ import annotations

import select
import signal
import sys


def main(owner: int) -> None:
    """Let the kernel reap orphans, and wait for the owner's end: `owner` is a pidfd."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    select.select([owner], [], [])


if __name__ == "__main__":
    main(int(sys.argv[1]))
