"""Object storage for tests: moto's S3 server, in this process and reachable from all others."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest


class Read(NamedTuple):
    """An answer with an object's content, or part of it."""

    key: str
    size: int
    """In bytes."""


class Outage:
    """A time in which a server has no answers."""

    def __init__(self) -> None:
        self._refused: list[str] = []
        self._asked = threading.Condition()

    def refuse(self, path: str) -> None:
        """Note what was asked for in vain."""
        with self._asked:
            self._refused.append(path)
            self._asked.notify_all()

    def wait_for_requests(self, count: int, *, about: str) -> None:
        """Wait until so many requests have been made in vain that have this in their path."""
        with self._asked:
            self._asked.wait_for(lambda: sum(about in path for path in self._refused) >= count)


@dataclass(kw_only=True)
class S3Server:
    """A server that runs."""

    url: str
    reads: list[Read] = field(default_factory=list)
    """What has been read of objects, in the order of the answers."""

    requests: list[str] = field(default_factory=list)
    """Method, path and query of each request, in their order."""

    outage: Outage | None = None
    """The present one."""

    deletes_only_one: bool = False
    """Whether it lacks the call that deletes many objects, as services that imitate S3 may."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process that is to read from this server has in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "the-key-of-the-tests",
            "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
            "AWS_REGION": "us-east-1",
            # No server on the network is to be asked for credentials.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def set_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process read from the server, whatever a developer has set up for another."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def client(self, service: str = "s3") -> Any:
        """A boto3 client of one of the services that the server offers."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            service,
            endpoint_url=self.url,
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=self.environment["AWS_REGION"],
            # Otherwise it would ask the proxy of the environment for this machine.
            config=Config(proxies={}),
        )

    def make_bucket(self, name: str) -> Bucket:
        """A new, empty bucket."""
        client = self.client()
        client.create_bucket(Bucket=name)
        return Bucket(name=name, server=self, client=client)

    @contextmanager
    def asking_for_credentials(self) -> Iterator[Mapping[str, str]]:
        """Let in nobody but one user, who has this in the environment."""
        from moto.core import enable_iam_authentication

        iam = self.client("iam")
        user = iam.create_user(UserName="reader")["User"]["UserName"]
        allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        policy = {"Version": "2012-10-17", "Statement": [allowed]}
        iam.put_user_policy(UserName=user, PolicyName="read", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName=user)["AccessKey"]
        with enable_iam_authentication():
            yield {
                **self.environment,
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            }

    @contextmanager
    def out_of_order(self) -> Iterator[Outage]:
        """Be there, and answer that this isn't a good time."""
        self.outage = Outage()
        try:
            yield self.outage
        finally:
            self.outage = None

    def reset(self) -> None:
        """Forget all buckets, users and reads."""
        connection = HTTPConnection(urlsplit(self.url).netloc)
        try:
            connection.request("POST", "/moto-api/reset")
            assert connection.getresponse().status == 200
        finally:
            connection.close()
        self.reads.clear()
        self.requests.clear()


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket of a server."""

    name: str
    server: S3Server
    client: Any

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Create objects, or replace them. No request is made: a thousand would take seconds."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        for key, content in objects.items():
            stored.put_object(self.name, key, content)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server on a port of its own, which any credentials will do for."""
    # Tests of other things needn't wait for this import.
    from moto.server import ThreadedMotoServer

    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.WARNING)  # A line for each request.
    threads = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threads.start()
    try:
        host, port = threads.get_host_and_port()
        server = S3Server(url=f"http://{host}:{port}")
        assert threads._server is not None
        # moto itself keeps account of requests, not of what it answers.
        threads._server.app = _watched(threads._server.app, server)
        yield server
    finally:
        threads.stop()
        log.setLevel(level)


def _watched(application: Callable[..., Any], server: S3Server) -> Callable[..., Any]:
    """The same WSGI application; before it answers with an object's content, that is noted."""
    # S3 is consistent; moto's threads trip over what others change meanwhile.
    one_at_a_time = threading.Lock()

    def watched(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            # WSGI has a path's bytes as if they were Latin-1.
            path = environ["PATH_INFO"].encode("latin-1").decode()
            _, _, key = path.lstrip("/").partition("/")
            if environ["REQUEST_METHOD"] == "GET" and key and status[:3] in ("200", "206"):
                sizes = {name.lower(): value for name, value in headers}
                server.reads.append(Read(key, int(sizes["content-length"])))
            return start_response(status, headers, *rest)

        query = unquote(environ.get("QUERY_STRING", ""))
        server.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{query}")
        outage = server.outage
        if server.deletes_only_one and environ["REQUEST_METHOD"] == "POST" and query == "delete":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("501 Not Implemented", [("Content-Length", "0")])
            return []
        if outage is None:
            with one_at_a_time:
                return application(environ, start)
        # Taken as a whole: closing a connection with something in it would break it off.
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        outage.refuse(environ["PATH_INFO"])
        start_response("503 Service Unavailable", [("Content-Length", "0")])
        return []

    return watched
