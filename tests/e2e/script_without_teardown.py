"""Run a script as `__main__`, and leave the process without tearing Python down.

With torch 2.13 a thread of Gloo may still be freeing the last all-reduce when Python ends, and then
aborts the process ("terminate called without an active exception"): on a busy machine one try in
four. Programs of torchrun that tests compare with are started by this one.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
