"""Keras on torch (`KERAS_BACKEND=torch`): a model that all workers train with `model.fit`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from polytrain.extension import adapted_digests, nested_layers, unequal_layers
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.collectives.node_group import gradient_group
from polytrain_torch.collectives.stopping import any_rank
from polytrain_torch.libraries import needed
from polytrain_torch.loaders.prepared import PreparedDataLoader
from polytrain_torch.private import after_backward, backward_pass
from polytrain_torch.randomness import file_of, random_state, restore_random_states
from polytrain_torch.virtual_workers import refuse_virtual_workers

with needed("keras"):
    import keras

__all__ = ["prepare_model"]

_SEEDS_APART = 10**6 + 3
"""How far the seeds of ranks are apart: Keras adds the number of draws so far to a seed."""


def prepare_model(model: Any) -> Any:
    """Average the gradients of all workers in every step. All ranks call this.

    The metrics of an epoch are averaged too, so that callbacks such as `EarlyStopping` decide the
    same on every rank.

    Args:
        model: a built `keras.Model`, the same on every rank; rank 0's weights are sent to all
            ranks. Each rank passes its own batches to `fit`. If the ranks have different numbers
            of batches, `fit` raises a `ValueError`.

    Returns:
        The same model.

    Raises:
        RuntimeError: Keras's backend isn't torch.
        ValueError: the model has no weights yet, weights of other shapes on some rank, or layers
            that `adapt` has fitted to other rows on some rank.
    """
    refuse_virtual_workers("Keras")
    if keras.backend.backend() != "torch":
        raise RuntimeError(
            f"Keras runs on {keras.backend.backend()}: set os.environ['KERAS_BACKEND'] = 'torch' "
            "in the training function, before Keras is imported."
        )
    if not model.built:
        raise ValueError(
            "The model isn't built, so it has no weights to share. Begin it with keras.Input, or "
            "call model.build(input_shape)."
        )
    agree_on_call("polytrain_torch.keras.prepare_model")
    gradients = AveragedGradients(model)
    gradients.renew()
    model.fit = partial(_fit_together, model.fit, gradients)
    if dist.get_world_size() == 1:
        return model
    # Values that a layer derives from its weights aren't broadcast.
    _check_adapted(model)
    for tensor in (*(each for _, each in parameters_in_order(model)), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    for variable in model.variables:
        if variable.path.endswith("seed_generator_state"):
            # Layers draw other numbers on each rank, also after a restart by rank 0's checkpoint.
            variable.value.detach()[0] += dist.get_rank() * _SEEDS_APART
    return model


def _fit_together(own_fit: Any, gradients: AveragedGradients, *args: Any, **options: Any) -> Any:
    named = dict(zip(_positional(own_fit), args, strict=False))
    given = {"callbacks": None, **named, **options}
    _refuse_prepared(given)
    # The model may have new parameters since it was prepared.
    gradients.renew()
    callbacks = given["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    listed = given["callbacks"] = [] if callbacks is None else keras.tree.flatten(callbacks)
    _refuse_own_checkpoints(listed)
    _refuse_reports_of_some(listed)
    for each in listed:
        # ReportCallback must begin epochs before all other callbacks, and end them after all.
        if hasattr(each, "arrange"):
            each.arrange(given)
            each.save_more, each.load_more = _save_random_states, _load_random_states
    given["callbacks"] = [_Together(), *given["callbacks"], _StopsTogether()]
    positional = [given[name] for name in named]
    # What is given twice, or can't be named, is passed on: Python's own error tells of it.
    keywords = {name: each for name, each in given.items() if name not in named or name in options}
    return own_fit(*positional, *args[len(named) :], **keywords)


def _save_random_states(directory: Path) -> None:
    """Write the states of all ranks' random numbers, of which Keras's layers draw some."""
    for rank, state in enumerate(gathered(random_state())):
        torch.save(state, directory / file_of(rank))


def _load_random_states(directory: Path) -> None:
    # Older checkpoints have none.
    if (directory / file_of(0)).exists():
        restore_random_states(directory)


def _positional(fit: Any) -> list[str]:
    """Return the names of the arguments that a model's `fit` takes by position.

    The class may have its own `fit`; what that takes as `*args` has Keras's names.
    """
    own, keras_own = (inspect.signature(each).parameters for each in (fit, keras.Model.fit))
    names = [name for name, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    return [*names, *[*keras_own][1 + len(names) :]]


def _refuse_prepared(given: Mapping[str, Any]) -> None:
    """Refuse loaders that Keras doesn't know.

    Raises:
        ValueError: a loader comes from `prepare_data_loader`.
    """
    for name, data in given.items():
        if isinstance(data, PreparedDataLoader):
            raise ValueError(
                f"{name}: Keras takes torch's own loaders, not those of prepare_data_loader. Pass "
                "a DataLoader of this rank's rows, for example with "
                "sampler=torch.utils.data.DistributedSampler(dataset, shuffle=False)."
            )


def _refuse_own_checkpoints(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that would change one rank's weights when a run resumes.

    Raises:
        ValueError: a callback saves and loads checkpoints of its own.
    """
    for each in callbacks:
        if isinstance(each, _OWN_CHECKPOINTS) and dist.get_world_size() > 1:
            raise ValueError(
                f"{type(each).__name__}: after a restart it would load weights of its own on the "
                "ranks that have it, beside the run's checkpoint. Leave it out: ReportCallback "
                "saves the run's checkpoints, and checkpointed_model() loads them."
            )


def _refuse_reports_of_some(callbacks: Sequence[Any]) -> None:
    """Refuse a `ReportCallback` that only some ranks have.

    Raises:
        ValueError: after a restart only those would restore their other callbacks.
    """
    have = gathered(any(hasattr(each, "arrange") for each in callbacks))
    if len(set(have)) > 1:
        raise ValueError(
            f"callbacks: {sum(have)} of {len(have)} ranks have a ReportCallback. Pass one on each: "
            "after a restart it restores the rank's other callbacks. Only rank 0's files are kept."
        )


_OWN_CHECKPOINTS = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "OrbaxCheckpoint")
    # Keras before 3.15 has only the first.
    if hasattr(keras.callbacks, name)
)


class _Together(keras.callbacks.Callback):
    """Averages metrics and BatchNormalization's statistics before the user's callbacks."""

    def on_train_begin(self, logs: Any = None) -> None:
        _check_adapted(self.model)
        batches = gathered(self.params.get("steps"))
        # None is unknown: then the error of a rank that waits names the one without batches.
        if len(set(batches)) > 1 and None not in batches:
            raise ValueError(
                f"The ranks have {', '.join(map(str, batches))} batches in an epoch, so the last "
                "gradients couldn't be averaged over all ranks. Give fit the same number of rows "
                f"on every rank, at most {min(batches)} * batch_size."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # _StopsTogether can't tell the last batch if their number is unknown.
        _average_statistics(self.model)
        if logs is None:
            return
        logs_by_rank = gathered(logs)
        # All ranks get a metric that only some have, such as rank 0's validation: by it callbacks
        # set the learning rate.
        for name in {name: None for each in logs_by_rank for name in each}:
            values = [each[name] for each in logs_by_rank if name in each]
            logs[name] = sum(values) / len(values)


class _StopsTogether(keras.callbacks.Callback):
    """Stops training on all ranks if a callback stops it on one: the others would wait for it.

    It runs after all callbacks of the user.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree()
        if self.model.stop_training or batch + 1 == self.params.get("steps"):
            # Before validation, which rank 0 may run alone.
            _average_statistics(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree()

    def _agree(self) -> None:
        self.model.stop_training = any_rank(self.model.stop_training)


def _check_adapted(model: Any) -> None:
    """Check that `adapt` has fitted layers to the same rows on all ranks.

    Raises:
        ValueError: a layer's statistics or vocabulary differ from another rank's.
    """
    mine = adapted_digests(model)
    by_rank = gathered(mine) if mine else []
    unequal = [name for name in mine if any(each.get(name) != mine[name] for each in by_rank)]
    if unequal:
        raise unequal_layers(unequal)


def _average_statistics(model: Any) -> None:
    """Average BatchNormalization's moving statistics: each rank's layers see its own rows."""
    if dist.get_world_size() == 1:
        return
    for layer in nested_layers(model):
        # A frozen layer keeps its statistics.
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            for variable in (layer.moving_mean, layer.moving_variance):
                statistic = variable.value.detach()
                dist.all_reduce(statistic, group=gradient_group(statistic.device))
                statistic /= dist.get_world_size()


class AveragedGradients:
    """Averages the gradients of a model's parameters at the end of each backward pass.

    It can't begin earlier, because a rank may skip layers in a step, as with stochastic depth. As
    in DDP, a parameter that only some ranks used counts as 0 on the others, and one that no rank
    used gets no gradient.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters: list[torch.Tensor] = []
        self._indices = WeakTensorKeyDictionary()
        self._hooked = WeakTensorKeyDictionary()
        self._used: set[int] = set()
        self._backward_pass: int | None = None

    def renew(self) -> None:
        """Use the parameters that the model has now. All ranks call this.

        Raises:
            ValueError: the ranks' parameters have different shapes.
        """
        if dist.get_world_size() == 1:
            return
        named = [each for each in parameters_in_order(self._model) if each[1].is_floating_point()]
        _check_same([(name, tuple(parameter.shape)) for name, parameter in named])
        self._parameters = [parameter for _, parameter in named]
        self._indices = WeakTensorKeyDictionary()
        for index, parameter in enumerate(self._parameters):
            self._indices[parameter] = index
            if parameter in self._hooked:
                continue
            # A frozen parameter may be trained later, but torch refuses a hook while it is frozen.
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._use)
            parameter.requires_grad_(is_trained)
            self._hooked[parameter] = True

    def _use(self, parameter: torch.Tensor) -> None:
        index = self._indices.get(parameter)
        if index is None:
            return
        this_pass = backward_pass()
        if this_pass != self._backward_pass:
            self._backward_pass = this_pass
            self._used.clear()
            after_backward(self._average)
        self._used.add(index)

    @torch.no_grad()
    def _average(self) -> None:
        device = self._parameters[0].device
        ranks = torch.zeros(len(self._parameters), device=device)
        ranks[list(self._used)] = 1
        dist.all_reduce(ranks, group=gradient_group(device))
        for parameter, number in zip(self._parameters, ranks.tolist(), strict=True):
            if not number:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=gradient_group(parameter.device))
            parameter.grad /= dist.get_world_size()


def parameters_in_order(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return a model's parameters with their names, in the order of their creation.

    torch orders them by name, and names differ by rank: Keras numbers layers over all models of a
    process.
    """
    named = [(variable.path, variable.value) for variable in model.variables]
    known = {id(parameter) for _, parameter in named}
    return named + [each for each in model.named_parameters() if id(each[1]) not in known]


def _check_same(mine: list[tuple[str, tuple[int, ...]]]) -> None:
    """Check that all ranks' parameters have the same shapes. Names may differ.

    Raises:
        ValueError: the shapes differ.
    """
    first, *others = gathered(mine)
    for rank, its in enumerate(others, start=1):
        for of_first, of_other in zip_longest(first, its, fillvalue=("nothing", ())):
            if of_first[1] != of_other[1]:
                raise ValueError(
                    f"The ranks have different models: where rank 0 has {_named(of_first)}, rank "
                    f"{rank} has {_named(of_other)}. Build the same model on every rank."
                )


def _named(parameter: tuple[str, tuple[int, ...]]) -> str:
    name, shape = parameter
    return f"{name} of shape {shape}"
