"""Writes docs/reference.md from the docstrings of all public names.

The sources are read, not imported, so neither Ray nor a framework is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"

PACKAGES = {
    "polytrain": "core",
    "polytrain_plugins": "plugins",
    "polytrain_torch": "plugin_torch",
    "polytrain_xgboost": "plugin_xgboost",
    "polytrain_lightgbm": "plugin_lightgbm",
    "polytrain_tf": "plugin_tf",
}

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Everywhere": ("polytrain", "polytrain.collective", "polytrain.trackers"),
    "torch": (
        "polytrain_torch",
        "polytrain_torch.lightning",
        "polytrain_torch.transformers",
        "polytrain_torch.accelerate",
        "polytrain_torch.deepspeed",
        "polytrain_torch.keras",
        "polytrain_torch.horovod",
        "polytrain_torch.horovod.elastic",
    ),
    "XGBoost": (
        "polytrain_xgboost",
        "polytrain_xgboost.reporting",
        "polytrain_xgboost.estimators",
    ),
    "LightGBM": (
        "polytrain_lightgbm",
        "polytrain_lightgbm.reporting",
        "polytrain_lightgbm.estimators",
    ),
    "TensorFlow and Keras": (
        "polytrain_tf",
        "polytrain_tf.reporting",
        "polytrain_tf.keras_callback",
    ),
    "For authors of backends and observers": ("polytrain_plugins", "polytrain_plugins.hookspecs"),
}
"""Heading of the page to the modules whose public names are below it."""

HEAD = """\
# Reference

Every public name, from its docstring. `make reference` writes this page.
"""

Documented = griffe.Class | griffe.Function | griffe.Attribute


def page() -> str:
    """The whole page, as Markdown."""
    loader = griffe.GriffeLoader(
        search_paths=[ROOT / folder / "src" for folder in PACKAGES.values()],
        docstring_parser=griffe.Parser.google,
        # Ray Train's trainers take theirs as `**arguments`.
        docstring_options={"warn_unknown_params": False, "warn_missing_types": False},
    )
    packages = {name: loader.load(name) for name in PACKAGES}
    loader.resolve_aliases(implicit=True, external=False)
    lines = [HEAD]
    seen: set[str] = set()
    for heading, modules in SECTIONS.items():
        lines.append(f"## {heading}\n")
        for module in modules:
            package, _, inner = module.partition(".")
            found = packages[package][inner] if inner else packages[package]
            for name, member in public_members(found):
                if member.path not in seen:
                    seen.add(member.path)
                    lines += entry(f"{module}.{name}", member)
    return "\n".join(lines)


def public_members(module: griffe.Module | griffe.Class) -> Iterator[tuple[str, Documented]]:
    """The names of `__all__`, or else the public ones that are defined there, in order of name."""
    names = module.exports
    for name in sorted(names if names is not None else module.members, key=str.lower):
        member = module.members.get(str(name))
        if member is None or (names is None and (str(name).startswith("_") or member.is_alias)):
            continue
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if isinstance(target, Documented) and (names is not None or target.has_docstring):
            yield str(name), target


def entry(path: str, found: Documented) -> Iterator[str]:
    """One name: its signature, what it does, and what belongs to it."""
    yield f"### `{path}`\n"
    if isinstance(found, griffe.Function):
        yield f"```text\n{signature(found)}\n```\n"
    yield from described(found)
    if isinstance(found, griffe.Class):
        yield from members(found)


def signature(function: griffe.Function, name: str | None = None) -> str:
    """As it is called, without `self`; over several lines if it is long."""
    parameters = [each for each in function.parameters if each.name not in ("self", "cls")]
    parts = list(written(parameters))
    returned = f" -> {function.returns}" if function.returns is not None else ""
    line = f"{name or function.name}({', '.join(parts)}){returned}"
    if len(line) <= 100 or not parts:
        return line
    inner = "".join(f"    {part},\n" for part in parts)
    return f"{name or function.name}(\n{inner}){returned}"


def written(parameters: Iterable[griffe.Parameter]) -> Iterator[str]:
    """Each parameter with its type and default, and the star before those that need their name."""
    starred = False
    for each in parameters:
        kind = each.kind
        prefix = ""
        if kind is griffe.ParameterKind.var_positional:
            prefix, starred = "*", True
        elif kind is griffe.ParameterKind.var_keyword:
            prefix = "**"
        elif kind is griffe.ParameterKind.keyword_only and not starred:
            yield "*"
            starred = True
        hint = f": {each.annotation}" if each.annotation is not None else ""
        default = f" = {each.default}" if each.default is not None and not prefix else ""
        yield f"{prefix}{each.name}{hint}{default}"


def described(found: Documented) -> Iterator[str]:
    """The parts of a docstring."""
    if found.docstring is None:
        return
    for part in found.docstring.parsed:
        match part:
            case griffe.DocstringSectionText():
                yield f"{part.value}\n"
            case griffe.DocstringSectionParameters():
                for each in part.value:
                    yield f"- `{each.name}`: {folded(each.description)}"
                yield ""
            case griffe.DocstringSectionRaises():
                for raised in part.value:
                    yield f"- raises `{raised.annotation}`: {folded(raised.description)}"
                yield ""
            case griffe.DocstringSectionReturns() | griffe.DocstringSectionYields():
                for returned in part.value:
                    yield f"- returns {folded(returned.description)}"
                yield ""


def members(found: griffe.Class) -> Iterator[str]:
    """Fields, properties and methods of a class, inherited ones included, if they are ours."""
    constructor = found.all_members.get("__init__")
    if isinstance(constructor, griffe.Alias):
        constructor = constructor.final_target
    if isinstance(constructor, griffe.Function) and constructor.has_docstring:
        yield f"```text\n{signature(constructor, found.name)}\n```\n"
        yield from described(constructor)
    attributes, methods = [], []
    for name, member in found.all_members.items():
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if name.startswith("_"):
            continue
        if isinstance(target, griffe.Attribute):
            attributes.append(attribute(name, target))
        elif isinstance(target, griffe.Function) and target.has_docstring:
            methods.append((name, target))
    yield from (*attributes, *([""] if attributes else []))
    for name, method in methods:
        yield f"#### `{found.name}.{name}`\n"
        yield f"```text\n{signature(method)}\n```\n"
        yield from described(method)


def attribute(name: str, found: griffe.Attribute) -> str:
    """A field with its type and default, or a property."""
    hint = f": {plain_type(found.annotation)}" if found.annotation is not None else ""
    has_default = "class-attribute" in found.labels and not str(found.value).startswith("field(")
    default = f" = {found.value}" if has_default and found.value is not None else ""
    text = f": {folded(found.docstring.value)}" if found.docstring else ""
    return f"- `{name}{hint}{default}`{text}"


def plain_type(annotation: griffe.Expr | str) -> str:
    """Without the constraints that `Annotated` adds."""
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        inner = annotation.slice
        return str(inner.elements[0] if isinstance(inner, griffe.ExprTuple) else inner)
    return str(annotation)


def folded(text: str) -> str:
    """On one line, as the entry of a list is."""
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is written\n")
