"""Writes docs/reference.md and the pages below it from the docstrings of all public names.

The sources are read, not imported, so neither Ray nor a framework is needed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
FOLDER = ROOT / "docs" / "reference"

PACKAGES = {
    "polytrain": "core",
    "polytrain_plugins": "plugins",
    "polytrain_torch": "plugin_torch",
    "polytrain_xgboost": "plugin_xgboost",
    "polytrain_lightgbm": "plugin_lightgbm",
    "polytrain_tf": "plugin_tf",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """One page of the reference.

    Attributes:
        modules: their public names are on the page, or only those in `names`.
        names: of `polytrain`, which has too many for one page.
    """

    file: str
    title: str
    modules: tuple[str, ...] = ("polytrain",)
    names: tuple[str, ...] | None = None


GROUPS = (
    Group(
        file="trainers",
        title="Trainers and configuration",
        names=(
            *("make_trainer", "Trainer", "DataParallelTrainer", "backend_names", "UserCallback"),
            *("ScalingConfig", "RunConfig", "FailureConfig", "CheckpointConfig", "DataConfig"),
            *("Mix", "TRAIN_DATASET_KEY"),
            *("ValidationConfig", "ValidationFn", "ValidationTaskConfig"),
            *("CheckpointConsistencyMode", "CheckpointUploadMode", "Rollback"),
        ),
    ),
    Group(
        file="training-functions",
        title="In a training function",
        modules=("polytrain", "polytrain.collective"),
        names=(
            *("report", "get_checkpoint", "checkpoint_requested", "get_dataset_shard", "heartbeat"),
            *("get_context", "Context", "TrainContext", "TrainRunContext"),
            *("get_preemption_info", "PreemptionInfo"),
            *("get_all_reported_checkpoints", "ReportedCheckpoint", "ReportedCheckpointStatus"),
        ),
    ),
    Group(
        file="results",
        title="Runs, results and checkpoints",
        names=(
            *("Result", "RunHandle", "RunStatus", "load", "Checkpoint", "PredictionOutput"),
            *("Replay", "Failure", "FailureKind"),
        ),
    ),
    Group(
        file="errors",
        title="Errors",
        names=(
            *("PolytrainError", "InvalidJobError", "TrainingFailedError", "BadDataError"),
            *("CheckpointError", "DamagedFileError", "NotInWorkerError", "ReturnValueError"),
            *("PredictionFailedError", "RunFormatError", "RunNotFoundError", "RunOwnedError"),
        ),
    ),
    Group(file="trackers", title="Trackers", modules=("polytrain.trackers",)),
    Group(
        file="torch",
        title="torch",
        modules=(
            "polytrain_torch",
            "polytrain_torch.lightning",
            "polytrain_torch.transformers",
            "polytrain_torch.accelerate",
            "polytrain_torch.deepspeed",
            "polytrain_torch.keras",
            "polytrain_torch.horovod",
            "polytrain_torch.horovod.elastic",
        ),
    ),
    Group(
        file="xgboost",
        title="XGBoost",
        modules=(
            "polytrain_xgboost",
            "polytrain_xgboost.reporting",
            "polytrain_xgboost.estimators",
        ),
    ),
    Group(
        file="lightgbm",
        title="LightGBM",
        modules=(
            "polytrain_lightgbm",
            "polytrain_lightgbm.reporting",
            "polytrain_lightgbm.estimators",
        ),
    ),
    Group(
        file="tensorflow",
        title="TensorFlow and Keras",
        modules=("polytrain_tf", "polytrain_tf.reporting", "polytrain_tf.keras_callback"),
    ),
    Group(
        file="extensions",
        title="For authors of backends and observers",
        modules=("polytrain_plugins", "polytrain_plugins.hookspecs", "polytrain.extension"),
    ),
)

HEAD = """\
# Reference

Every public name, from its docstring. `make reference` writes these pages.
"""

Documented = griffe.Class | griffe.Function | griffe.Attribute


def pages() -> dict[Path, str]:
    """The text of each page, as Markdown."""
    loader = griffe.GriffeLoader(
        search_paths=[ROOT / folder / "src" for folder in PACKAGES.values()],
        docstring_parser=griffe.Parser.google,
        # Ray Train's trainers take theirs as `**arguments`.
        docstring_options={"warn_unknown_params": False, "warn_missing_types": False},
    )
    packages = {name: loader.load(name) for name in PACKAGES}
    loader.resolve_aliases(implicit=True, external=False)
    ungrouped = {name for name, _ in public_members(packages["polytrain"])}
    ungrouped -= {name for group in GROUPS for name in group.names or ()}
    if ungrouped:
        raise SystemExit(f"add to a group in {Path(__file__).name}: {', '.join(sorted(ungrouped))}")
    seen: set[str] = set()
    found = {group: list(unseen(entries_of(group, packages), seen)) for group in GROUPS}
    places = {
        member.path: f"[`{path}`]({group.file}.md#{anchor})"
        for group, entries in found.items()
        for anchor, (path, member) in anchored(entries)
    }
    written = {
        FOLDER / f"{group.file}.md": "\n".join(
            [f"# {group.title}\n", *(line for each in entries for line in entry(*each, places))]
        )
        for group, entries in found.items()
    }
    overview = [HEAD, *(line for group, each in found.items() for line in listed(group, each))]
    return {PAGE: "\n".join(overview), **written}


Entry = tuple[str, Documented]
"""A name by which users import it, and what it is."""


def entries_of(
    group: Group, packages: Mapping[str, griffe.Module | griffe.Class]
) -> Iterator[Entry]:
    """The names of a page, those of a module in order of name, or as the group lists them."""
    for module in group.modules:
        package, _, inner = module.partition(".")
        members = dict(public_members(packages[package][inner] if inner else packages[package]))
        for name in (group.names or ()) if module == "polytrain" else members:
            yield f"{module}.{name}", members[name]


def unseen(entries: Iterable[Entry], seen: set[str]) -> Iterator[Entry]:
    """Those that no earlier page has: what two modules export is described once."""
    for path, member in entries:
        if member.path not in seen:
            seen.add(member.path)
            yield path, member


def listed(group: Group, entries: Iterable[Entry]) -> Iterator[str]:
    """A group in the overview: each name with its first sentence."""
    yield f"## {group.title}\n"
    for anchor, (path, member) in anchored(entries):
        text = member.docstring.value if member.docstring is not None else ""
        sentence = re.split(r"(?<=[.:])\s", folded(text.partition("\n\n")[0]))[0].rstrip(":")
        yield f"- [`{path}`](reference/{group.file}.md#{anchor}): {sentence}"
    yield ""


def anchored(entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """The names of a page's headings in links, as forges make them: numbered if one comes again."""
    times = Counter[str]()
    for entry in entries:
        name = entry[0].lower().replace(".", "")
        yield (f"{name}-{times[name]}" if times[name] else name), entry
        times[name] += 1


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


def entry(path: str, found: Documented, places: Mapping[str, str]) -> Iterator[str]:
    """One name: its signature, what it does, and what belongs to it.

    Args:
        places: links to all classes that have an entry, by the path where each is defined.
    """
    yield f"## `{path}`\n"
    if isinstance(found, griffe.Function):
        yield f"```text\n{signature(found)}\n```\n"
    yield from described(found)
    if isinstance(found, griffe.Class):
        yield from members(found, places)


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
                # Each line is a part of its own.
                lines = [folded(line.description) for line in part.value]
                yield f"- returns: {' '.join(lines)}\n"


def members(found: griffe.Class, places: Mapping[str, str]) -> Iterator[str]:
    """Fields, properties and methods of a class.

    Those inherited from a class with an entry of its own are only named.
    """
    constructor = found.all_members.get("__init__")
    if isinstance(constructor, griffe.Alias):
        constructor = constructor.final_target
    if isinstance(constructor, griffe.Function) and constructor.has_docstring:
        yield f"```text\n{signature(constructor, found.name)}\n```\n"
        yield from described(constructor)
    attributes, methods = [], []
    inherited: dict[str, list[str]] = {}
    for name, member in found.all_members.items():
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if name.startswith("_") or not has_entry(target):
            continue
        base = places.get(target.parent.path) if target.parent is not None else None
        if name not in found.members and base is not None:
            inherited.setdefault(base, []).append(f"`{name}`")
        elif isinstance(target, griffe.Attribute):
            attributes.append(attribute(name, target))
        elif isinstance(target, griffe.Function):
            methods.append((name, target))
    yield from (*attributes, *([""] if attributes else []))
    for base, names in inherited.items():
        yield f"Inherited from {base}: {', '.join(names)}.\n"
    for name, method in methods:
        yield f"### `{found.name}.{name}`\n"
        yield f"```text\n{signature(method)}\n```\n"
        yield from described(method)


def has_entry(member: griffe.Object) -> bool:
    """Whether a member of a class is described: fields always, methods if they say what they do."""
    return isinstance(member, griffe.Attribute) or (
        isinstance(member, griffe.Function) and member.has_docstring
    )


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
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
        sys.stdout.write(f"{path.relative_to(ROOT)} is written\n")
