"""Downloads over loopback: complete and checked, or no file and an error that says what to do."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.data.sets.formats import find_format
from echelon.data.sets.published import PUBLISHED, Archive, Published, fetch, find_published, get
from echelon.errors import DataError, UsageError

BODY = bytes(range(256)) * 3000
DIGEST = hashlib.sha256(BODY).hexdigest()


def packed(*names: str) -> bytes:
    """Return a .tar.gz of folder/NAME for every name, all with the same bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = len(BODY)
            tar.addfile(member, io.BytesIO(BODY))
    return stream.getvalue()


FILES = {
    "/file": BODY,
    "/no-length": BODY,
    "/half": BODY,
    "/set/a.gz": gzip.compress(BODY),
    "/set/b.tar.gz": packed("readme", "b", "../c"),
    "/other/a.gz": gzip.compress(b"other"),
    "/other/b.tar.gz": packed("b"),
    "/page/a.gz": b"<html>log in first</html>",
    "/page/b.tar.gz": b"<html>log in first</html>",
    "/cut/a.gz": gzip.compress(BODY)[:-12],
    "/cut/b.tar.gz": packed("b", "c")[:-200],
    "/mnist/train-images-idx3-ubyte.gz": gzip.compress(os.urandom(1 << 18)),
}
SET = Published("set", "", "set", (Archive("a.gz", {"a": DIGEST}), Archive("b.tar.gz", {"b": DIGEST, "c": DIGEST})))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        if self.path not in FILES:
            self.send_error(404)
            return
        body = FILES[self.path]
        self.send_response(200)
        if self.path != "/no-length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path == "/half" else body)

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


def files(folder: Path) -> list[str]:
    """Return the files below a folder, including hidden ones."""
    found = (path for path in folder.rglob("*") if path.is_file() or path.name.startswith("."))
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.parametrize("path", ["/file", "/no-length"])
def test_a_file_is_downloaded_completely(server: HTTPServer, tmp_path: Path, path: str) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    fetch(url(server, path), target)
    assert target.read_bytes() == BODY
    assert files(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/gone", r"cannot download http.*/gone: the server responded 404 .*copy the file to .*/file by hand"),
        ("/half", rf"received only {len(BODY) // 2} of {len(BODY)} bytes of http.*/half; nothing was kept, try again"),
    ],
)
def test_a_failed_download_leaves_no_file(server: HTTPServer, tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fetch(url(server, path), tmp_path / "file")
    assert files(tmp_path) == []


def test_a_refused_connection_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as closed:
        closed.bind(
            ("127.0.0.1", 0)
        )  # bound but not listening: connections are refused, and no other process can use the port
        port = closed.getsockname()[1]
        with pytest.raises(DataError, match=rf"cannot download http://127.0.0.1:{port}/x: Connection refused; ask Ann"):
            fetch(f"http://127.0.0.1:{port}/x", tmp_path / "x", "ask Ann")
    assert files(tmp_path) == []


def test_invalid_requests_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="http://"):
        fetch("file:///etc/hostname", tmp_path / "x")
    with pytest.raises(UsageError, match=r"cannot create the folder .*Not a directory; use another --data-dir"):
        list(get(SET, Path(__file__) / "data", "http://127.0.0.1:9"))
    with pytest.raises(UsageError, match=r"unknown published data set 'fashion'; did you mean 'fashion-mnist'\?"):
        find_published("fashion")
    with pytest.raises(UsageError, match=r"unknown published data set 'imagenet'; .*im2rec"):
        find_published("imagenet")


def test_a_set_is_unpacked_and_only_wrong_files_are_downloaded_again(server: HTTPServer, tmp_path: Path) -> None:
    wanted = [tmp_path / "data" / "set" / name for name in "abc"]
    mirror = url(server, "/set/")
    assert list(get(SET, tmp_path / "data", mirror)) == [(path, True) for path in wanted]
    assert [path.read_bytes() for path in wanted] == [BODY] * 3
    assert files(tmp_path) == ["data/set/a", "data/set/b", "data/set/c"]
    wanted[2].write_bytes(BODY[:-1])
    assert list(get(SET, tmp_path / "data", mirror)) == list(zip(wanted, (False, True, True), strict=True))
    assert wanted[2].read_bytes() == BODY
    assert server.requests == ["/set/a.gz", "/set/b.tar.gz", "/set/b.tar.gz"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "archive", "message"),
    [
        ("other", 0, rf"a from http.*/other/a.gz is not the published file: its SHA-256 is .*, expected {DIGEST}"),
        ("other", 1, r"/other/b.tar.gz does not contain c; nothing was kept, try another --mirror"),
        ("page", 0, r"/page/a.gz is not a complete archive: Not a gzipped file"),
        ("page", 1, r"/page/b.tar.gz is not a complete archive: not a gzip file"),
        ("cut", 0, r"/cut/a.gz is not a complete archive: Compressed file ended before"),
        ("cut", 1, r"/cut/b.tar.gz is not a complete archive: "),
        ("gone", 0, r"/gone/a.gz: the server responded 404 .*; get .*/set/a, or use a mirror: --mirror ADDRESS"),
    ],
)
def test_a_wrong_archive_leaves_the_old_files(
    server: HTTPServer, tmp_path: Path, kind: str, archive: int, message: str
) -> None:
    one = replace(SET, archives=SET.archives[archive : archive + 1])
    old = tmp_path / "set" / next(iter(one.archives[0].files))
    old.parent.mkdir()
    old.write_bytes(b"old")
    with pytest.raises(DataError, match=message):
        list(get(one, tmp_path, url(server, f"/{kind}")))
    assert old.read_bytes() == b"old"
    assert files(tmp_path) == [f"set/{old.name}"]


def test_the_command_reports_an_error_in_one_line(
    server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "get", "mnist", "--data-dir", str(tmp_path), "--mirror", url(server, "/mnist")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == f"mnist from {url(server, '/mnist')}"
    assert "train-images-idx3-ubyte.gz is not the published file" in err.splitlines()[1]
    assert files(tmp_path) == []


@pytest.mark.parametrize(("limit", "message"), [(1 << 17, "cannot download"), (len(BODY) // 2, "cannot unpack")])
def test_a_full_disk_is_reported_and_leaves_no_files(
    server: HTTPServer, tmp_path: Path, limit: int, message: str
) -> None:
    """A limit on the file size simulates a full disk, during the download or while unpacking."""
    mirror = url(server, "/mnist" if message == "cannot download" else "/set")
    code = (
        "import resource, sys; from pathlib import Path; from echelon.data.sets.published import *; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); archive = Archive(sys.argv[2], {{'a': ''}}); "
        "list(get(Published('set', '', 'set', (archive,)), Path('.'), sys.argv[1]))"
    )
    archive = "train-images-idx3-ubyte.gz" if message == "cannot download" else "a.gz"
    command = [sys.executable, "-c", code, mirror, archive]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert f"{message} {mirror}/{archive}" in done.stderr
    assert "File too large; nothing was kept; free some space" in done.stderr
    assert files(tmp_path) == []


def test_published_file_names_match_the_formats(tmp_path: Path) -> None:
    formats = {"mnist": "mnist (idx)", "fashion-mnist": "mnist (idx)", "cifar10": "cifar10 (binary)"}
    assert PUBLISHED.keys() == formats.keys()
    for name, published in PUBLISHED.items():
        folder = tmp_path / name
        folder.mkdir()
        names = [file for archive in published.archives for file in archive.files]
        for file in names:
            (folder / file).touch()
        file_format, _ = find_format(folder)
        assert file_format.name == formats[name]
        assert sorted(names) == sorted(file_format.train + file_format.val)
        assert all(len(digest) == 64 for archive in published.archives for digest in archive.files.values())
