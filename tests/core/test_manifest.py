"""The manifest of a checkpoint: written, read back, refused when torn, compared with the files."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.checkpoint.manifest import (
    MANIFEST_NAME,
    Attempt,
    Manifest,
    StoredFile,
    differences,
    parse_manifest,
)

MANIFEST = Manifest(
    number=3,
    attempt=Attempt(claim=2, generation=1),
    step=40,
    metrics={"loss": 0.25, "valid": {"auc": 0.9}, "lrs": [0.1, 0.01], "name": "é"},
    backend="torch",
    written_by="every rank",
    versions={"python": "3.11.9", "torch": "2.7.1"},
    created="2024-02-29T12:00:00+00:00",
    world_size=2,
    positions={"train": {"epoch": 2, "position": 512}},
    files=(
        StoredFile(name="model.pt", size=10, sha256="ab", rank=0),
        StoredFile(name="optimizer/état 1", size=0, sha256="cd", rank=1),
    ),
)

# What Python's json says of text that ends too early, or what `parse_manifest` says itself.
NOT_READABLE = r"char \d+|not a manifest|manifest format|content isn't what was written"

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert parse_manifest(MANIFEST.to_json()) == MANIFEST


@given(metrics=st.dictionaries(st.text(), plain, max_size=4))
def test_metrics_are_kept_exactly(metrics: dict[str, object]) -> None:
    manifest = replace(MANIFEST, metrics=metrics)
    assert parse_manifest(manifest.to_json()).metrics == metrics


def test_a_loss_that_is_not_a_number_is_kept() -> None:
    manifest = replace(MANIFEST, metrics={"loss": math.nan, "worst": math.inf})
    read = parse_manifest(manifest.to_json()).metrics
    assert math.isnan(read["loss"])
    assert read["worst"] == math.inf


@given(end=st.integers(0, len(MANIFEST.to_json()) - 1))
def test_a_manifest_that_is_cut_off_anywhere_is_refused(end: int) -> None:
    with pytest.raises(ValueError, match=NOT_READABLE):
        parse_manifest(MANIFEST.to_json()[:end])


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "3", "{}", '{"format": 1}', '{"format": 2}', '"manifest"']
)
def test_what_is_json_and_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=NOT_READABLE):
        parse_manifest(text)


@pytest.mark.parametrize("field", ["format", "sha256", "manifest"])
def test_what_lacks_a_part_of_a_manifest_is_refused(field: str) -> None:
    fields = json.loads(MANIFEST.to_json())
    del fields[field]
    with pytest.raises(ValueError, match=NOT_READABLE):
        parse_manifest(json.dumps(fields))


@pytest.mark.parametrize("field", ["number", "attempt", "files", "metrics"])
def test_a_manifest_that_lacks_a_field_is_refused(field: str) -> None:
    fields = json.loads(MANIFEST.to_json())
    del fields["manifest"][field]
    with pytest.raises(ValueError, match="isn't what was written"):
        parse_manifest(json.dumps(fields))


def test_another_format_is_refused_by_its_number() -> None:
    fields = {**json.loads(MANIFEST.to_json()), "format": 99}
    with pytest.raises(ValueError, match="manifest format 99"):
        parse_manifest(json.dumps(fields))


def test_files_that_are_all_there_make_no_difference() -> None:
    sizes = {"model.pt": 10, "optimizer/état 1": 0, MANIFEST_NAME: 700}
    assert differences(MANIFEST, sizes) == ()


def test_a_missing_and_a_short_file_are_named() -> None:
    assert differences(MANIFEST, {"model.pt": 7}) == (
        "model.pt has 7 bytes instead of 10",
        "optimizer/état 1 is missing",
    )
