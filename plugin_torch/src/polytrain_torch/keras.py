"""Keras on torch (`KERAS_BACKEND=torch`): a model that all workers train by `model.fit`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.libraries import needed
from polytrain_torch.node_group import gradient_group

with needed("keras"):
    import keras


def prepare_model(model: Any) -> Any:
    """Have the workers' gradients averaged whenever there are new ones. All ranks call this.

    Args:
        model: a `keras.Model` that is built, the same on every rank; rank 0's weights are sent to
            all. What each rank gives `fit` is its part of the batches.

    Returns:
        The same model.

    Raises:
        RuntimeError: Keras's backend isn't torch.
        ValueError: the model has no weights yet.
    """
    if keras.backend.backend() != "torch":
        raise RuntimeError(
            f"Keras runs on {keras.backend.backend()}: set os.environ['KERAS_BACKEND'] = 'torch' "
            "in the training function, before Keras is imported."
        )
    if not model.built:
        raise ValueError(
            "The model isn't built, so there are no weights to share. Begin it with keras.Input, "
            "or call model.build(input_shape)."
        )
    if dist.get_world_size() == 1:
        return model
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            group = gradient_group(parameter.device)
            parameter.register_post_accumulate_grad_hook(partial(_average, group))
    return model


def _average(group: Any, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, group=group)
    parameter.grad /= dist.get_world_size()
