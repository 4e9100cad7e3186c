"""Python imports this at the start of every process that has this directory on its path."""

from tests.crash.tracing import watch_at_start

watch_at_start()
