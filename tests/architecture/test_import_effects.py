"""An import of polytrain, or of one of its plugins, does nothing but import."""

from __future__ import annotations

import subprocess
import sys

import pytest

AUDITED = """
import os, sys

EFFECTS = (
    *("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system"),
    *("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"),
    *("os.truncate", "os.utime", "shutil.", "tempfile.", "urllib."),
)
seen = []


def effect(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event.startswith(EFFECTS):
        seen.append(f"{event} {arguments}")


sys.addaudithook(effect)
"""

MODULES = [
    *("polytrain", "polytrain_plugins"),
    *("polytrain_torch", "polytrain_xgboost", "polytrain_lightgbm", "polytrain_tf"),
]


def effects(statements: str) -> list[str]:
    """What a new interpreter, which writes no bytecode, does besides the statements."""
    script = f"{AUDITED}\n{statements}\nprint(*seen, sep='\\n', end='')"
    run = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("module", MODULES)
def test_an_import_opens_no_socket_starts_no_process_and_writes_no_file(module: str) -> None:
    assert effects(f"import {module}") == []


def test_neither_does_the_use_of_any_public_name() -> None:
    statements = "import polytrain\nfor name in polytrain.__all__: getattr(polytrain, name)"
    assert effects(statements) == []


@pytest.mark.parametrize(
    "statements",
    [
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork() or os._exit(0)",
        "open('/dev/null', 'w')",
        "import tempfile; tempfile.TemporaryFile()",
    ],
)
def test_an_effect_would_be_seen(statements: str) -> None:
    assert effects(statements)
