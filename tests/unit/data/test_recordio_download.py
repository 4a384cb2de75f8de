"""Downloads over loopback: whole and checked, or no file and an error that says what to do."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from echelon.data.download import fetch, require_file
from echelon.errors import DataError, UsageError

BODY = bytes(range(256)) * 3000
DIGEST = hashlib.sha256(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/gone":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path != "/no-length":
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: len(BODY) // 2] if self.path == "/half" else BODY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        http.requests = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def url(server: HTTPServer, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


@pytest.mark.parametrize("path", ["/file", "/no-length"])
def test_a_file_arrives_whole(server: HTTPServer, tmp_path: Path, path: str) -> None:
    target = tmp_path / "file"
    assert fetch(url(server, path), target, sha256=DIGEST.upper()) == target
    assert target.read_bytes() == BODY
    assert list(tmp_path.iterdir()) == [target]


def test_a_good_file_is_not_fetched_again_and_a_bad_one_is(server: HTTPServer, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    for _ in range(2):
        fetch(url(server, "/file"), target, sha256=DIGEST)
        assert target.read_bytes() == BODY
    assert server.requests == ["/file"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "sha256", "message"),
    [
        ("/gone", None, "the server answers 404"),
        ("/half", None, f"broke off: {len(BODY) // 2} of {len(BODY)} bytes"),
        ("/file", "0" * 64, f"sha256 is {DIGEST}, expected {'0' * 64}"),
    ],
)
def test_no_half_files(server: HTTPServer, tmp_path: Path, path: str, sha256: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fetch(url(server, path), tmp_path / "file", sha256=sha256)
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: the port refuses, and nobody else can take it
        port = closed.getsockname()[1]
        with pytest.raises(DataError, match=rf"cannot download http://127.0.0.1:{port}/x to .*copy the file there"):
            fetch(f"http://127.0.0.1:{port}/x", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_impossible_requests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="http://"):
        fetch("file:///etc/hostname", tmp_path / "x")
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        fetch("http://127.0.0.1/x", tmp_path / "x", sha256="abc")
    with pytest.raises(UsageError, match="mkdir -p"):
        fetch("http://127.0.0.1/x", tmp_path / "none" / "x")


def test_a_missing_file_says_what_where_and_how(tmp_path: Path) -> None:
    (tmp_path / "b.rec").write_bytes(b"")
    assert require_file("cifar10", ["a.rec", "b.rec"], tmp_path, "make") == tmp_path / "b.rec"
    with pytest.raises(DataError) as caught:
        require_file("cifar10", ["c.rec"], tmp_path / "none", "echelon data convert X Y")
    assert str(caught.value) == (
        f"cifar10: no file c.rec in {tmp_path}/none, which does not exist; make it: echelon data convert X Y"
    )
