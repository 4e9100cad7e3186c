"""An agent reads its rank's rows beside its event loop."""

from __future__ import annotations

import subprocess
import sys

HANGS = """
import threading
from polytrain.workers.agents.rank_data import RankData
from polytrain.workers.agents.shard_cache import CacheRequest
from polytrain.workers.processes.loop_thread import LoopThread
class Hanging:
    def __init__(self):
        self.has_begun = threading.Event()
    def open(self):
        self.has_begun.set()
        threading.Event().wait()
    fetch = open
rows, shared = Hanging(), Hanging()
data, loop = RankData(), LoopThread("reads")
request = CacheRequest(specs=rows, shard_cache=b"", references=[], tables=())
loop.call(data.request, request)
loop.submit(data.fetch([shared]))
rows.has_begun.wait()
shared.has_begun.wait()
loop.close()
"""


def test_a_program_ends_while_what_an_agent_reads_hangs() -> None:
    """Its file server is gone, and a signal has ended the run."""
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=60)
