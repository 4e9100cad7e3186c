"""The object storage that tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.object_storage import Bucket, S3Server, s3_server


@pytest.fixture(scope="session")
def object_storage() -> Iterator[S3Server]:
    """The S3 server of all tests here that need one."""
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(object_storage: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The bucket that s3://bucket means, according to the environment alone."""
    object_storage.set_environment(monkeypatch)
    yield object_storage.make_bucket("bucket")
    object_storage.reset()
