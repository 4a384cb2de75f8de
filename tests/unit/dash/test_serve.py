"""Where the page listens, and the process that serves it beside a job."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
from dash_pages import begin, write

from echelon.dash.serve import DEFAULT_PORT, PageProcess, listen, read_address
from echelon.errors import UsageError


def test_a_taken_port_is_an_error_with_advice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"listen on 127.0.0.1 port {port}: Address already in use; give another"):
            listen(port=port)


def test_without_a_port_a_free_one_replaces_the_usual_one() -> None:
    with listen().bound, listen().bound as second:
        assert second.getsockname()[1] != DEFAULT_PORT


def test_only_loopback_addresses_need_no_token() -> None:
    with listen(port=0).bound as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    local, everywhere = listen(port=0), listen("0.0.0.0", 0)
    with local.bound, everywhere.bound:
        assert local.token is None
        assert local.url == f"http://127.0.0.1:{local.port}/"
        assert everywhere.token is not None
        assert len(everywhere.token) >= 32
        assert everywhere.url == f"http://{socket.gethostname()}:{everywhere.port}/?token={everywhere.token}"


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("nosuch.invalid", 0, "the live page cannot listen on 'nosuch.invalid'"),
        ("192.0.2.1", 0, "Cannot assign requested address; give another port, 0 for any free one, or an address of"),
        ("127.0.0.1", 70000, "port 70000 of the live page is outside 0 to 65535"),
        ("127.0.0.1", -1, "port -1 of the live page is outside 0 to 65535"),
    ],
)
def test_addresses_that_cannot_be(host: str, port: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        listen(host, port)


def test_addresses_are_read() -> None:
    assert read_address("8080") == ("127.0.0.1", 8080)
    assert read_address("0.0.0.0:0") == ("0.0.0.0", 0)
    assert read_address("[::1]:8080") == ("::1", 8080)
    for text in ("python", "host:", "host:x", "", "²"):
        with pytest.raises(UsageError, match="is neither a port nor HOST:PORT"):
            read_address(text)


def test_the_page_of_a_job_ends_with_it(tmp_path: Path) -> None:
    write(tmp_path, begin(0))
    listener = listen(port=0)
    with PageProcess(tmp_path, listener), urllib.request.urlopen(f"{listener.url}healthz", timeout=60) as answer:
        assert answer.read() == b"ok\n"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{listener.url}healthz", timeout=60)
