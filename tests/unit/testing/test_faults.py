"""Faults look at a process whose framework has threads of its own."""

from __future__ import annotations

import os
import socket

import pytest

from polytrain.testing.faults import count_services


def test_a_socket_that_a_thread_closes_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = count_services()
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0)) as closing:
        real = os.dup

        def dup(descriptor: int) -> int:
            if descriptor == closing.fileno():
                closing.close()
            return real(descriptor)

        monkeypatch.setattr(os, "dup", dup)
        assert count_services() == before + 1
