"""Why a runtime environment couldn't be set up: Ray's message without its own stack."""

from __future__ import annotations

from polytrain.config.runtime_env import cause_of

NO_FILE = """Could not create the actor because its associated runtime env failed to be created.
[Node 192.0.2.2] Traceback (most recent call last):
  File "ray/runtime_env/agent.py", line 561, in _create_runtime_env_with_retry
    runtime_env_context = await asyncio.wait_for(
                          ^^^^^^^^^^^^^^^^^^^^^^^
FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/code.zip'
"""

PIP = """Could not create the actor because its associated runtime env failed to be created.
[Node 192.0.2.2] Traceback (most recent call last):
  File "ray/runtime_env/pip.py", line 132, in __init__
    import virtualenv
ModuleNotFoundError: No module named 'virtualenv'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "ray/runtime_env/pip.py", line 374, in _create_for_hash
    await PipProcessor(

SubprocessCalledProcessError: Run cmd[9] failed with the following details.
Command '['python', '-m', 'pip', 'install', 'nosuch==9']' returned non-zero exit status 1.
Last 50 lines of stdout:
    Traceback (most recent call last):
    ERROR: Could not find a version that satisfies the requirement nosuch==9
    ERROR: No matching distribution found for nosuch==9
"""


def test_the_exception_stays_and_the_stack_goes() -> None:
    assert cause_of(NO_FILE) == (
        "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/code.zip'\n"
        "(on Node 192.0.2.2)"
    )


def test_the_output_of_pip_stays_whole() -> None:
    first, *_, last, node = cause_of(PIP).splitlines()
    assert first == "SubprocessCalledProcessError: Run cmd[9] failed with the following details."
    assert last == "    ERROR: No matching distribution found for nosuch==9"
    assert node == "(on Node 192.0.2.2)"
    assert "ray/runtime_env" not in cause_of(PIP)


def test_a_message_without_a_stack_is_kept() -> None:
    assert cause_of("it timed out\n") == "it timed out"
