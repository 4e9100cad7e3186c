"""The manifest of a checkpoint: written, read back, refused when torn, compared with the files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sweeps import examples

from polytrain.checkpoint.manifest import (
    FORMAT,
    MANIFEST_NAME,
    AttemptId,
    Manifest,
    StoredFile,
    UnknownFormatError,
    differences,
    directory_name,
    merged,
    parse_directory_name,
    parse_manifest,
)

MANIFEST = Manifest(
    number=3,
    attempt_id=AttemptId(token=2, attempt=1),
    step=40,
    metrics={"loss": 0.25, "valid": {"auc": 0.9}, "lrs": [0.1, 0.01], "name": "é"},
    backend="torch",
    written_by="every_rank",
    versions={"python": "3.11.9", "torch": "2.7.1"},
    created="2024-02-29T12:00:00+00:00",
    world_size=2,
    positions={"train": {"epoch": 2, "position": 512}},
    virtual_workers=4,
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


def test_every_reader_of_json_takes_a_manifest() -> None:
    """RFC 8259 has neither NaN nor infinities."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    manifest = replace(MANIFEST, metrics={"loss": math.nan, "of": [-math.inf]})
    json.loads(manifest.to_json(), parse_constant=refuse)


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


@pytest.mark.parametrize("field", ["number", "attempt_id", "files", "metrics"])
def test_a_manifest_that_lacks_a_field_is_refused(field: str) -> None:
    fields = json.loads(MANIFEST.to_json())
    del fields["manifest"][field]
    with pytest.raises(ValueError, match="isn't what was written"):
        parse_manifest(json.dumps(fields))


def test_another_format_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as another_version:
        another_version.setattr("polytrain.checkpoint.manifest.FORMAT", 99)
        written = MANIFEST.to_json()
    with pytest.raises(UnknownFormatError, match="manifest format 99"):
        parse_manifest(written)


def test_a_number_that_nobody_wrote_is_damage() -> None:
    fields = {**json.loads(MANIFEST.to_json()), "format": 99}
    with pytest.raises(ValueError, match="isn't what was written"):
        parse_manifest(json.dumps(fields))


def test_files_that_are_all_there_make_no_difference() -> None:
    sizes = {"model.pt": 10, "optimizer/état 1": 0, MANIFEST_NAME: 700}
    assert differences(MANIFEST, sizes) == ()


def test_a_missing_and_a_short_file_are_named() -> None:
    assert differences(MANIFEST, {"model.pt": 7}) == (
        "model.pt has 7 bytes instead of 10",
        "optimizer/état 1 is missing",
    )


TEXT = MANIFEST.to_json()
edits = st.one_of(
    st.tuples(st.just("replace"), st.integers(0, len(TEXT) - 1), st.characters()),
    st.tuples(st.just("insert"), st.integers(0, len(TEXT)), st.characters()),
    st.tuples(st.just("delete"), st.integers(0, len(TEXT) - 1), st.just("")),
    # What is likely to be read all the same.
    st.tuples(
        st.just("replace"), st.integers(0, len(TEXT) - 1), st.sampled_from('0123456789eE.-+" abf')
    ),
)


@pytest.mark.sweep
@settings(max_examples=examples(2000, in_test=400))
@given(edit=edits)
def test_a_change_of_one_character_is_noticed_or_means_the_same(
    edit: tuple[str, int, str],
) -> None:
    what, place, character = edit
    changed = TEXT[:place] + character + TEXT[place + (what != "insert") :]
    try:
        read = parse_manifest(changed)
    except ValueError:
        return
    assert read == MANIFEST


@given(flipped=st.integers(0, 8 * len(TEXT.encode()) - 1))
def test_a_flipped_bit_is_noticed_or_means_the_same(flipped: int) -> None:
    content = bytearray(TEXT.encode())
    content[flipped // 8] ^= 1 << flipped % 8
    try:
        read = parse_manifest(bytes(content))
    except ValueError:
        return
    assert read == MANIFEST


def files(rank: int, contents: Mapping[str, str]) -> list[StoredFile]:
    return [
        StoredFile(name=name, size=len(content), sha256=content, rank=rank)
        for name, content in contents.items()
    ]


@given(
    parts=st.dictionaries(
        st.integers(0, 4),
        st.dictionaries(st.sampled_from("abc"), st.sampled_from(["x", "yy"]), max_size=3),
    )
)
def test_the_parts_of_all_ranks_make_one_directory_or_the_two_at_odds_are_named(
    parts: dict[int, dict[str, str]],
) -> None:
    held: dict[str, dict[str, int]] = {}
    for rank in sorted(parts):
        for name, content in parts[rank].items():
            held.setdefault(name, {}).setdefault(content, rank)
    stored = {rank: files(rank, contents) for rank, contents in parts.items()}
    if all(len(contents) == 1 for contents in held.values()):
        found = {(file.name, file.sha256, file.rank) for file in merged(stored)}
        assert found == {(n, c, rank) for n, by in held.items() for c, rank in by.items()}
        assert len(merged(stored)) == len(held)
        return
    with pytest.raises(ValueError, match="names of their own") as caught:
        merged(stored)
    named = re.match(r"Ranks (\d+) and (\d+) both wrote '(.)'", str(caught.value))
    assert named is not None
    one, other, name = int(named[1]), int(named[2]), named[3]
    assert parts[one][name] != parts[other][name]


def test_a_file_and_a_directory_of_one_name_are_refused() -> None:
    parts = {0: files(0, {"a/b": "0", "ab": "0"}), 2: files(2, {"a/b/c/d": "2"})}
    with pytest.raises(ValueError, match=r"Rank 0 wrote a file 'a/b', and rank 2 a directory"):
        merged(parts)


attempts = st.builds(AttemptId, token=st.integers(1, 10**9), attempt=st.integers(0, 10**9))


@given(number=st.integers(0, 10**9), attempt_id=attempts)
def test_a_directory_is_reported_by_its_name(number: int, attempt_id: AttemptId) -> None:
    assert parse_directory_name(directory_name(number, attempt_id)) == (number, attempt_id)


@given(
    numbers=st.lists(st.integers(0, 10**6 - 1), unique=True, max_size=8),
    attempt_id=attempts,
)
def test_names_of_one_attempt_sort_as_their_numbers(
    numbers: list[int], attempt_id: AttemptId
) -> None:
    names = sorted(directory_name(number, attempt_id) for number in numbers)
    assert names == [directory_name(number, attempt_id) for number in sorted(numbers)]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "checkpoint_000001",
        "checkpoint_1-1.0",
        "checkpoint_000001-1",
        "checkpoint_000001-1.0.tmp",
        ".checkpoint_000001-1.0",
        "checkpoint_000001-1.0\n",
        "checkpoint_-00001-1.0",
        "mine",
    ],
)
def test_another_directory_is_none_of_the_runs(name: str) -> None:
    assert parse_directory_name(name) is None


@given(attempts=st.lists(attempts, max_size=5))
def test_of_two_attempts_that_of_the_later_driver_is_later(attempts: list[AttemptId]) -> None:
    by_numbers = sorted(attempts, key=lambda attempt_id: (attempt_id.token, attempt_id.attempt))
    assert sorted(attempts) == by_numbers


@pytest.mark.parametrize(
    "changes",
    [
        {"number": "../../3"},
        {"attempt_id": {"token": "../2", "attempt": 1}},
        {"attempt_id": {"token": 2, "attempt": "1/../.."}},
        {"files": [{"name": "model.pt", "size": 10, "sha256": "ab", "rank": "0/../../etc"}]},
        {"files": [{"name": "../model.pt", "size": 10, "sha256": "ab", "rank": 0}]},
        {"files": [{"name": ["model.pt"], "size": 10, "sha256": "ab", "rank": 0}]},
    ],
)
def test_what_becomes_part_of_a_path_is_a_number_or_a_name(changes: Mapping[str, object]) -> None:
    """Whoever writes a manifest can write its hash, too."""
    body = {**json.loads(MANIFEST.to_json())["manifest"], **changes}
    digest = hashlib.sha256(json.dumps([FORMAT, body], sort_keys=True).encode()).hexdigest()
    with pytest.raises(ValueError, match=r"isn't used as a path|not (a whole|text)"):
        parse_manifest(json.dumps({"format": FORMAT, "sha256": digest, "manifest": body}))
