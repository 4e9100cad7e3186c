"""PyTorch Lightning in a training function: a `Trainer` that finds its workers and its checkpoint.

    from polytrain_torch.lightning import Trainer

A script only has to import it in place of `from lightning import Trainer`.
"""

from polytrain_torch.lightning.environments import WorkerEnvironment
from polytrain_torch.lightning.trainer import Trainer

__all__ = ["Trainer", "WorkerEnvironment"]
