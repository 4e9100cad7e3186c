"""Every public name exists and is documented: the contract's, the core's and each backend's."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import polytrain
import polytrain_plugins
from polytrain_plugins import Backend, Engine, Session, Shard
from polytrain_plugins.hookspecs import BackendHooks, ObserverHooks

PACKAGES = [polytrain, polytrain_plugins]


def exported(module: ModuleType) -> list[tuple[str, Any]]:
    return [(name, getattr(module, name)) for name in module.__all__]


EXPORTS = [
    pytest.param(name, value, id=f"{module.__name__}.{name}")
    for module in PACKAGES
    for name, value in exported(module)
]
CLASSES = sorted(
    {value for module in PACKAGES for _, value in exported(module) if inspect.isclass(value)},
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_public_names_are_sorted_and_reported_once(module: ModuleType) -> None:
    names = module.__all__
    constants = [name for name in names if name.isupper()]
    classes = [name for name in names if name[0].isupper() and not name.isupper()]
    functions = [name for name in names if name[0].islower()]
    assert names == [*sorted(constants), *sorted(classes), *sorted(functions)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("name", "value"), EXPORTS)
def test_every_public_name_is_documented(name: str, value: Any) -> None:
    if inspect.isclass(value) or inspect.isfunction(value):
        own = value.__doc__
        assert own
        # What dataclasses make up by themselves says nothing.
        assert not own.startswith(f"{value.__name__}(")


def strings_after(cls: type) -> set[str]:
    """The attributes of a class that a docstring follows."""
    lines, _ = inspect.getsourcelines(cls)
    [tree] = ast.parse(inspect.cleandoc("\n" + "".join(lines))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.target.id
        for node, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


@pytest.mark.parametrize("hooks", [BackendHooks, ObserverHooks])
def test_every_hook_has_a_promise(hooks: type) -> None:
    found = [hook for name, hook in inspect.getmembers(hooks) if name.startswith("polytrain_")]
    assert found
    assert all(hook.__doc__ for hook in found)


@pytest.mark.parametrize("cls", [Backend, Engine, Session, Shard])
def test_what_authors_implement_is_documented(cls: type) -> None:
    members = {
        name: member
        for name, member in vars(cls).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    }
    assert members
    undocumented = [name for name, member in members.items() if not inspect.getdoc(member)]
    # The one whose meaning is in the class's own docstring.
    assert undocumented in ([], ["joined"])


def test_every_option_of_a_run_is_documented() -> None:
    """A field explains itself by a docstring, unless it is another configuration or a choice."""
    from polytrain.config.configs import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    undocumented = {
        field.name
        for cls in (ScalingConfig, RunConfig, FailureConfig, CheckpointConfig)
        for field in dataclasses.fields(cls)
        if field.name not in strings_after(cls)
    }
    assert undocumented <= {"failure_config", "checkpoint_config", "checkpoint_score_order"}


@pytest.mark.parametrize(
    "package", ["polytrain_torch", "polytrain_xgboost", "polytrain_lightgbm", "polytrain_tf"]
)
def test_every_option_of_a_backend_is_documented(package: str) -> None:
    [backend] = import_module(package).polytrain_backends()
    options = {field.name for field in dataclasses.fields(backend)}
    # Of those that several share, where these are declared.
    classes = [cls for cls in backend.__mro__ if "__dataclass_fields__" in vars(cls)]
    assert options <= set().union(*map(strings_after, classes))
    assert backend.__doc__


@pytest.mark.parametrize(
    "package", ["polytrain_torch", "polytrain_xgboost", "polytrain_lightgbm", "polytrain_tf"]
)
def test_the_names_of_a_backends_package_are_there(package: str) -> None:
    module = import_module(package)
    assert module.__all__ == sorted(module.__all__, key=lambda name: (name[0].islower(), name))
    # Not looked up: some import their framework. They are defined here or said to be elsewhere.
    tree = ast.parse(Path(str(module.__file__)).read_text())
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(module.__all__) <= known
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
