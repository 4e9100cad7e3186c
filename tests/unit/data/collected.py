"""Collects garbage at a moment at which no finalizer may wait for a thread."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest


def collect_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect garbage in a thread that holds the lock without which none starts or ends."""
    thread = threading.Thread(target=lambda: None)

    class Limbo(dict[threading.Thread, threading.Thread]):
        """The threads that are about to start, to which Python adds them under that lock."""

        def __setitem__(self, key: threading.Thread, value: threading.Thread) -> None:
            if key is thread:
                gc.collect()
            super().__setitem__(key, value)

    private: Any = threading
    monkeypatch.setattr(private, "_limbo", Limbo(private._limbo))
    starting = threading.Thread(target=thread.start, daemon=True)
    starting.start()
    starting.join(timeout=60)
    assert not starting.is_alive()
    monkeypatch.undo()
