"""States of sharded models and of their optimizers, keyed by parameter names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from polytrain_torch.checkpoints.optimizer_types import restore_types
from polytrain_torch.checkpoints.sharded import SafeReader, load_sharded
from polytrain_torch.models.parallel import unwrapped
from polytrain_torch.private import WRAPPERS_IN_NAMES

State = dict[str, Any]

IN_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Gather unsharded tensors on rank 0's CPU."""


class ShardedParts:
    """The parts of a training state. Models and optimizers among them may be sharded."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts

    def check_optimizers(self) -> None:
        """Check that each optimizer trains existing parameters, all in one part if sharded.

        Raises:
            ValueError: one was made before the model was sharded, or its model isn't a part.
        """
        self._raise_if_stale()
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer) and is_sharded(part):
                self.trained_by(name)

    def state(
        self,
        name: str,
        options: StateDictOptions | None = None,
        *,
        has_state: bool | None = None,
    ) -> State:
        """Return a part's state, keyed by the names of the model's parameters.

        Args:
            name: the part's name.
            options: torch's options.
            has_state: whether an optimizer's state has entries for parameters; by default, as now.
        """
        part = self._parts[name]
        state: State
        if isinstance(part, torch.nn.Module):
            state = get_model_state_dict(part, options=options)
        elif not (bool(part.state) if has_state is None else has_state):
            # To create the state, torch would take an optimizer step.
            state = self.by_name(name, {**part.state_dict(), "state": {}})
        else:
            state = get_optimizer_state_dict(self.trained_by(name), part, options=options)
        return state

    def load(self, name: str, state: State, options: StateDictOptions | None = None) -> None:
        """Load a part's state, keyed by parameter names as `state` returns it."""
        part = self._parts[name]
        if isinstance(part, torch.nn.Module):
            set_model_state_dict(part, state, options=options)
        else:
            # A parameter that no loss has used yet has no state. Without any state, torch finds no
            # device for whole tensors.
            options = (state["state"] and options) or StateDictOptions()
            options = replace(options, strict=False)
            set_optimizer_state_dict(self.trained_by(name), part, state, options=options)
            # torch has taken an optimizer step, which created a state of each parameter.
            known = {id(each) for each, _ in self.named_states(name, state)}
            for each in _parameters(part):
                if id(each) not in known:
                    part.state.pop(each, None)

    def named_states(
        self, optimizer: str, saved: State
    ) -> list[tuple[torch.Tensor, Mapping[str, Any]]]:
        """Return the parameters that have a state in `saved`, which names them, and that state.

        Raises:
            ValueError: a state is of a parameter that the model hasn't.
        """
        model = unwrapped(self.trained_by(optimizer))
        # Tied weights have several names.
        named = {
            _without_wrappers(name): each
            for name, each in model.named_parameters(remove_duplicate=False)
        }
        if unknown := saved["state"].keys() - named.keys():
            raise ValueError(f"{optimizer}: its model has no parameter {min(unknown)!r}")
        return [(named[name], state) for name, state in saved["state"].items()]

    def by_name(self, optimizer: str, state: State) -> State:
        """Return an optimizer's state keyed by parameter names in place of numbers."""
        model = unwrapped(self.trained_by(optimizer))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups: list[Any] = []
        by_name: dict[str, Any] = {}
        for group, mine in zip(
            state["param_groups"], self._parts[optimizer].param_groups, strict=True
        ):
            numbered = dict(zip(group["params"], mine["params"], strict=True))
            named = {number: names[id(parameter)] for number, parameter in numbered.items()}
            groups.append({**group, "params": list(named.values())})
            by_name |= {
                named[number]: state["state"][number]
                for number in named
                if number in state["state"]
            }
        return {"state": by_name, "param_groups": groups}

    def trained_by(self, optimizer: str) -> torch.nn.Module:
        """Return the model whose parameters an optimizer trains."""
        mine = {id(parameter) for parameter in _parameters(self._parts[optimizer])}
        trained = {
            name: part
            for name, part in self._parts.items()
            if isinstance(part, torch.nn.Module) and not mine.isdisjoint(map(id, part.parameters()))
        }
        for part in trained.values():
            if mine <= {id(parameter) for parameter in part.parameters()}:
                return part
        if not trained:
            raise ValueError(
                f"{optimizer}: it trains sharded parameters of a model that isn't a part. Pass the "
                "model too: TrainingState(model=model, …)."
            )
        raise ValueError(
            f"{optimizer}: it trains sharded parameters that aren't all in one part, only some in "
            f"{' and '.join(map(repr, trained))}. Make one optimizer for each model, or pass one "
            "module that holds all of them."
        )

    def saved_groups(self, names: list[str], directory: Path) -> dict[str, State]:
        """Return what parameters the groups of these optimizers had. All ranks call this."""
        saved = SafeReader(directory).read_metadata().state_dict_metadata if names else ()
        groups: dict[str, State] = {}
        for name in names:
            its = [key for key in saved if key.startswith(f"{name}.param_groups.")]
            of_groups = [key for key in its if key.endswith(".params")]
            if of_groups:
                groups[name] = {"param_groups": [{"params": []} for _ in of_groups]}
        if groups:
            load_sharded(groups, directory)
        return groups

    def load_all(self, names: list[str], directory: Path) -> None:
        """Load the shards of these parts. All ranks call this."""
        if not names:
            return
        saved = SafeReader(directory).read_metadata().state_dict_metadata
        of_optimizers = {name: with_state(name, saved) for name in names}
        states = {name: self.state(name, has_state=bool(of_optimizers[name])) for name in names}
        for name, state in states.items():
            if "param_groups" in state:
                # torch has made a state for each trained parameter; some may have none there.
                state["state"] = {
                    key: its for key, its in state["state"].items() if key in of_optimizers[name]
                }
        load_sharded(states, directory)
        for name, state in states.items():
            self.load(name, state)
            if "param_groups" in state:
                restore_types(self._parts[name], self.named_states(name, state))

    def _raise_if_stale(self) -> None:
        """Refuse an optimizer of parameters that sharding has replaced: it trains nothing."""
        models = [part for part in self._parts.values() if isinstance(part, torch.nn.Module)]
        replaced = [shapes for model in models if is_sharded(model) for shapes in _shapes(model)]
        there = {id(parameter) for model in models for parameter in model.parameters()}
        for name, part in self._parts.items():
            # Compare shapes too: it may train another model, which isn't a part.
            if (
                isinstance(part, torch.optim.Optimizer)
                and not is_sharded(part)
                and there.isdisjoint(map(id, _parameters(part)))
                and Counter(each.shape for each in _parameters(part)) in replaced
            ):
                raise ValueError(
                    f"{name}: it trains no parameter of the model, because sharding has replaced "
                    "the parameters that it was made with. Make it after prepare_model."
                )


def beside_shards(model: torch.nn.Module) -> State:
    """Return the unsharded entries of a sharded model's state, such as BatchNorm's statistics."""
    state = unwrapped(model).state_dict()
    return {name: each for name, each in state.items() if not isinstance(each, DTensor)}


def is_sharded(part: Any) -> bool:
    """Whether a model, or an optimizer's model, has sharded parameters, or those that they make."""
    has_shards = any(isinstance(parameter, DTensor) for parameter in _parameters(part))
    return has_shards or bool(fsdp_modules(part))


def fsdp_modules(part: Any) -> list[FSDPModule]:
    """Return the modules of a model that FSDP2 shards.

    After a forward pass without a backward pass, as in an evaluation, the outermost one has whole
    parameters in place of its shards until all ranks call its `reshard`. If only some ranks did,
    only they would gather the shards in the next forward pass, and wait for the others.
    """
    modules = part.modules() if isinstance(part, torch.nn.Module) else ()
    return [each for each in modules if isinstance(each, FSDPModule)]


def is_flattened(part: Any) -> bool:
    """Whether FSDP's first version shards a model, whose state only all ranks together gather."""
    is_model = isinstance(part, torch.nn.Module)
    return is_model and any(isinstance(each, FullyShardedDataParallel) for each in part.modules())


def is_consolidated(part: Any) -> bool:
    """Whether each rank has a piece of an optimizer's state, and one rank gathers the whole.

    torch's ZeroRedundancyOptimizer does so: on other ranks its `state_dict` raises.
    """
    return hasattr(part, "consolidate_state_dict")


def with_state(optimizer: str, saved: Iterable[str]) -> set[str]:
    """Return the parameters of which a checkpoint has an optimizer's state.

    Args:
        optimizer: the optimizer's name.
        saved: the names of all that the checkpoint has. A part of a nested state has a longer one,
            so all beginnings are returned that may be a parameter's.
    """
    found: set[str] = set()
    prefix = f"{optimizer}.state."
    for each in saved:
        own = each.removeprefix(prefix) if each.startswith(prefix) else ""
        # Its beginnings are there already if it is.
        while (own := own.rpartition(".")[0]) and own not in found:
            found.add(own)
    return found


def _without_wrappers(name: str) -> str:
    """Return a parameter's name as torch saves it, without what wraps parts of its model."""
    return ".".join(each for each in name.split(".") if each not in WRAPPERS_IN_NAMES)


def _shapes(model: torch.nn.Module) -> list[Counter[torch.Size]]:
    """Count the shapes of a model's parameters: of all, and of those that need gradients."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [Counter(each.shape for each in some) for some in (parameters, trained)]


def _parameters(part: Any) -> Iterator[Any]:
    if isinstance(part, torch.nn.Module):
        yield from part.parameters()
    elif isinstance(part, torch.optim.Optimizer):
        for group in part.param_groups:
            yield from group["params"]


def names_parameters(state: State) -> bool:
    """Whether an optimizer's state is keyed by parameter names, as full states are."""
    groups: Any = state.get("param_groups")
    return bool(groups) and any(isinstance(each, str) for each in groups[0].get("params", ()))
