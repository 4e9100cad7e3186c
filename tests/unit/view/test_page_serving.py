"""A run's page, served while the run is active: to this machine alone."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.unit.record.recorded import RUN, journal

from polytrain.run.lease import leased
from polytrain.storage.location import Location
from polytrain.view.cli import main
from polytrain.view.page.reading import read_facts
from polytrain.view.page.rendering import page
from polytrain.view.page.serving import PageServer, served


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal(RUN)))
    return tmp_path


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    with served(Location.of(run, retry_s=0)) as server:
        yield server


def asked(
    server: PageServer, path: str | None = None, host: str | None = None, method: str = "GET"
) -> HTTPResponse:
    """The answer to a request; by default for what the printed address names."""
    address = urlsplit(server.url)
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    path = f"{address.path}?{address.query}" if path is None else path
    connection.request(method, path, headers={} if host is None else {"Host": host})
    return connection.getresponse()


def test_the_page_of_a_finished_run_is_not_asked_for_again(server: PageServer) -> None:
    answer = asked(server)
    assert answer.status == 200
    assert "Finished in 13.0 s" in answer.read().decode()
    assert answer.headers["Refresh"] is None
    text = asked(server).read().decode()
    assert "data-refresh" not in text.partition("<script")[0]


def test_the_page_of_an_active_run_follows_it(server: PageServer, run: Path) -> None:
    file = run / "journal.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:8]))
    storage = Location.of(run).open()
    with leased(storage, storage):
        answer = asked(server)
        text = answer.read().decode()
        assert "Still running after" in text
        # Its own script asks again; the header would load all anew.
        assert answer.headers["Refresh"] is None
        assert '<body data-refresh="5">' in text
        assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in text
        assert "connect-src" in text
        assert "it shows what was there then" not in text
        file.write_bytes(whole)
    assert "Finished in 13.0 s" in asked(server).read().decode()


def test_a_page_in_a_file_fetches_nothing(run: Path) -> None:
    text = page(read_facts(Location.of(run)))
    assert "connect-src" not in text
    assert "fetch(" not in text


def test_a_run_that_went_away_is_reported(server: PageServer, run: Path) -> None:
    (run / "journal.jsonl").unlink()
    answer = asked(server)
    assert answer.status == 503
    assert "There is no run in" in answer.read().decode()


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=guessed", "/other", "/index.html", "*"])
def test_who_does_not_have_the_printed_address_gets_nothing(path: str, server: PageServer) -> None:
    answer = asked(server, path)
    text = answer.read().decode()
    assert answer.status == 403
    assert "Open the address that `polytrain show --serve` has printed" in text
    assert "Finished" not in text


def test_each_server_has_a_token_of_its_own(server: PageServer, run: Path) -> None:
    with served(Location.of(run, retry_s=0)) as other:
        assert asked(other, f"/?{urlsplit(server.url).query}").status == 403
        assert asked(other).status == 200


def test_the_address_does_not_leave_with_a_link(server: PageServer) -> None:
    assert asked(server).headers["Referrer-Policy"] == "no-referrer"


def test_a_page_of_a_name_that_leads_here_gets_nothing(server: PageServer) -> None:
    assert asked(server, host="evil.example:80").status == 403


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_answered(method: str, server: PageServer) -> None:
    assert asked(server, method=method).status == 501


def test_it_listens_to_this_machine_alone(server: PageServer) -> None:
    assert asked(server).status == 200
    # An address of this machine that only a server on all addresses answers.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.server_port), timeout=30)


def test_the_command_serves_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "polytrain", "show", str(run), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        said = serving.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)(/\S*) ", said)
        assert found, said
        connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
        connection.request("GET", found[2])
        assert connection.getresponse().status == 200
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=60) == 0


def test_a_port_that_is_taken(
    server: PageServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run), "--serve", "--port", str(server.server_port)]) == 1
    error = capsys.readouterr().err
    assert "--port" in error
    assert "in use" in error


def test_a_port_without_serving(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--port", "8000"]) == 2
    assert "--serve" in capsys.readouterr().err
