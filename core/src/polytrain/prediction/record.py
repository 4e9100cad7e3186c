"""The record of an output's predictions: written before the files, and compared later. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polytrain.functions.code_fingerprint import code_fingerprint
from polytrain.record.configuration import shown
from polytrain.run.identity import is_full, plain
from polytrain.storage.typed_json import Count, fitting
from polytrain.text import strict_json
from polytrain.text.described import numbered
from polytrain_plugins import Problem

RECORD_FILE = "_predictions.json"
"""Name of the record's file; readers of Parquet directories ignore leading underscores."""

_FORMAT = 1

_ELSEWHERE = "Give a different output, or delete this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRecord:
    """The parts of a request for predictions that determine the content of the files."""

    model: str
    """Digest of the checkpoint's files."""

    data: str
    """Fingerprint of the data set."""

    rows: Count
    rows_per_file: Count
    keep: tuple[str, ...]
    prediction_column: str
    options: Mapping[str, Any]
    """Options that are plain values."""

    code: Mapping[str, str]
    """Option → fingerprint of its function or object."""

    python: str
    """Python version; fingerprints of code can only be compared within one version."""

    finished: bool = False

    def to_json(self) -> bytes:
        """Return the content of the record's file."""
        return strict_json.dumps({"format": _FORMAT, **asdict(self)}).encode()


def record_from_json(content: bytes) -> PredictionRecord | None:
    """Read a record; None if the content isn't one, or has a different format."""
    try:
        values = strict_json.loads_to_show(content)
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            return None
        return fitting(PredictionRecord, values, file=RECORD_FILE)
    except ValueError:
        return None


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return plain options, with `…` for secrets by name, and fingerprints of the other options."""
    values = {name: shown(plain(value), name) for name, value in options.items()}
    code = {
        name: code_fingerprint(options[name])
        for name, value in values.items()
        if not is_full(value)
    }
    return {name: value for name, value in values.items() if name not in code}, code


def record_problems(
    before: PredictionRecord, now: PredictionRecord, *, place: str
) -> Iterator[Problem]:
    """Yield the differences between a request and the one whose predictions an output holds.

    Args:
        before: the output's record.
        now: the record of the user's request.
        place: the output, for messages.
    """
    if before.model != now.model:
        yield _other(place, "a different model, or a different checkpoint of it")
    if (before.data, before.rows) != (now.data, now.rows):
        counts = f"{numbered(before.rows, 'row')}; these have {now.rows}"
        how = "as many rows" if before.rows == now.rows else counts
        yield _other(place, f"different data ({how})")
    for field in ("keep", "prediction_column", "rows_per_file"):
        was, is_ = getattr(before, field), getattr(now, field)
        if was != is_:
            shown = list(was) if isinstance(was, tuple) else was
            yield Problem(
                field=field,
                what=f"the predictions in {place!r} were begun with {shown!r}",
                remedy=f"Pass the same. {_ELSEWHERE}",
            )
    yield from _option_problems(before, now, place)


def _option_problems(
    before: PredictionRecord, now: PredictionRecord, place: str
) -> Iterator[Problem]:
    for name in sorted({*before.options, *before.code, *now.options, *now.code}):
        was = _shown(before, name)
        if was != _shown(now, name):
            remedy = f"Pass the same. {_ELSEWHERE}"
        elif before.python == now.python and before.code.get(name) != now.code.get(name):
            was, remedy = "with different code", _ELSEWHERE
        else:
            continue
        yield Problem(
            field=name, what=f"the predictions in {place!r} were begun {was}", remedy=remedy
        )


def _shown(record: PredictionRecord, name: str) -> str:
    if name in record.code:
        return "with a function or an object"
    return f"with {record.options[name]!r}" if name in record.options else "without it"


def _other(place: str, of: str) -> Problem:
    return Problem(field="output", what=f"{place!r} has predictions of {of}", remedy=_ELSEWHERE)
