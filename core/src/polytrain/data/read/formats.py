"""Formats of files: known by a file's name, or by its first bytes."""

from __future__ import annotations

import os
from typing import Any

import pyarrow.fs as pafs

from polytrain.storage.filesystems import ResolvedPath
from polytrain.storage.location import OPTIONS

_FORMATS = {
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "ipc",
    ".feather": "ipc",
    ".ipc": "ipc",
}

_MAGIC_NUMBERS = {b"PAR1": "parquet", b"ARROW1": "ipc"}
"""The first bytes of a file, by format."""

_WAYS = {
    "": "A file whose name has no ending is read if it is a Parquet or Arrow file. If it is a CSV "
    "file with a header line, add .csv to its name; if it has an object in each line, .jsonl",
    ".orc": "Pass pyarrow.dataset.dataset(path, format='orc')",
    ".json": "If it has an object in each line, rename it to .jsonl. If it is a list of objects, "
    "pass json.load(file)",
    ".arrows": "Pass pyarrow.ipc.open_stream(path)",
    ".tfrecord": "Pass ray.data.read_tfrecords(path)",
    ".txt": "Pass ray.data.read_text(path)",
    ".npy": 'Pass {"x": np.load(path)}',
    ".npz": "Pass dict(np.load(path))",
    ".xlsx": "Pass pandas.read_excel(path)",
    **dict.fromkeys(
        (".tar", ".tgz"),
        "Pass ray.data.read_webdataset(path), or a map-style data set over extracted files",
    ),
    **dict.fromkeys(
        (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        "Pass a map-style data set, such as torchvision.datasets.ImageFolder(directory, "
        "transform=…), or ray.data.read_images(path)",
    ),
}
"""Remedies for files of other formats."""

_CODECS = {
    **{".gz": "gzip", ".gzip": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd"},
    **{".lz4": "lz4", ".br": "brotli", ".brotli": "brotli"},
}


def format_of(place: str) -> str | None:
    """The format by the ending of a file's name; compressed files have two endings."""
    return _FORMATS.get(ending_of(place))


def ending_of(place: str) -> str:
    """The ending of a file's name, in lower case, without that of a compression."""
    name = OPTIONS.sub("", place) if "://" in place else place
    name = without_compression(name.lower())
    # Within the file, so that it isn't a compressed file.
    if (stem := name.removesuffix(".snappy")).endswith((".parquet", ".parq", ".pq")):
        name = stem
    return os.path.splitext(name)[1]


def way_to_pass(place: str, otherwise: str) -> str:
    """The remedy for a file of another format, by its ending."""
    return _WAYS.get(ending_of(place), otherwise)


def format_inside(where: ResolvedPath, path: str) -> str | None:
    """The format by a file's first bytes; None if it isn't known or can't be read."""
    # Not of a pipe, for which one would wait.
    if where.filesystem.get_file_info(path).type != pafs.FileType.File:
        return None
    try:
        with where.filesystem.open_input_stream(path, compression=None) as file:
            start = file.read(max(map(len, _MAGIC_NUMBERS)))
    except OSError:
        return None
    formats = (kind for magic, kind in _MAGIC_NUMBERS.items() if start.startswith(magic))
    return next(formats, None)


def without_compression(name: str) -> str:
    """A file's name without the ending of a compression, if it has one."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in _CODECS else name


def open_decompressed(place: ResolvedPath) -> Any:
    """A stream of a file's content; the name says whether the file is compressed."""
    ending = os.path.splitext(place.path)[1].lower()
    # Arrow itself doesn't know all of these endings.
    return place.filesystem.open_input_stream(place.path, compression=_CODECS.get(ending))
