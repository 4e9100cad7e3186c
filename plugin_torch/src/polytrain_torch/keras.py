"""Keras on torch (`KERAS_BACKEND=torch`): a model that all workers train by `model.fit`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.collecting import gathered
from polytrain_torch.libraries import needed
from polytrain_torch.node_group import gradient_group

with needed("keras"):
    import keras


def prepare_model(model: Any) -> Any:
    """Have the workers' gradients averaged whenever there are new ones. All ranks call this.

    The metrics of an epoch are averaged as well, so that callbacks such as `EarlyStopping` decide
    the same on every rank.

    Args:
        model: a `keras.Model` that is built, the same on every rank; rank 0's weights are sent to
            all. What each rank gives `fit` is its part of the batches, as many as the others'; if
            not, `fit` raises a `ValueError`.

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
    model.fit = partial(_fit_together, model.fit)
    if dist.get_world_size() == 1:
        return model
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            group = gradient_group(parameter.device)
            parameter.register_post_accumulate_grad_hook(partial(_average, group))
    return model


def _fit_together(own_fit: Any, *args: Any, callbacks: Any = None, **options: Any) -> Any:
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        listed = options["callbacks"] = [] if callbacks is None else keras.tree.flatten(callbacks)
        for each in listed:
            # One that reports has to begin epochs before all others, and end them after all.
            if hasattr(each, "arrange"):
                each.arrange(options)
        callbacks = [_Together(), *options.pop("callbacks")]
    return own_fit(*args, callbacks=callbacks, **options)


class _Together(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Before any callback of the user's."""

    def on_train_begin(self, logs: Any = None) -> None:
        batches = gathered(self.params.get("steps"))
        # None is not known yet; whoever waits then for a rank that has none left names it.
        if len(set(batches)) > 1 and None not in batches:
            raise ValueError(
                f"The ranks have {', '.join(map(str, batches))} batches in an epoch: there would "
                "be nobody to average the last gradients with. Give fit as many rows on every "
                f"rank, at most {min(batches)} * batch_size."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None:
            return
        everybodys = gathered(logs)
        for name in logs:
            values = [each[name] for each in everybodys if name in each]
            # What only some have, such as a validation by rank 0, is theirs.
            if len(values) == len(everybodys):
                logs[name] = sum(values) / len(values)


def _average(group: Any, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, group=group)
    parameter.grad /= dist.get_world_size()
