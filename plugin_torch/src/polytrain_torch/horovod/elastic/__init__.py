"""Elastic training: `TorchState`, `run` and `ElasticSampler`."""

from polytrain_torch.horovod.elastic.sampler import ElasticSampler
from polytrain_torch.horovod.elastic.state import TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
