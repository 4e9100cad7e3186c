"""DeepSpeed, imported so that the process can still fork. For zygotes, see `tests.zygotes`.

DeepSpeed's autotuner imports MLflow if it can, and with it Polars, which starts a thread. Each
worker process would then import torch and DeepSpeed itself, for seconds.
"""

import importlib
import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules["mlflow"] = None
importlib.import_module("deepspeed")
del modules["mlflow"]
