"""Fetch a file by URL, whole and checked, or not at all; and say clearly what to do where a file is missing.

Owns the transfer: a temporary name, a progress bar, the digest, then the rename. Which files a dataset needs is for
the datasets to know.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from echelon.data.atomic import AtomicFile, check_writable
from echelon.data.progress import Advance, bar
from echelon.errors import DataError, UsageError

TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 18


def fetch(url: str, path: Path, *, sha256: str | None = None, timeout_s: float = TIMEOUT_S) -> Path:
    """Download `url` to `path` and return it; a file that is there with the right digest is left alone."""
    _check_request(url, sha256)
    if path.is_file() and (sha256 is None or file_sha256(path) == sha256.lower()):
        return path
    check_writable(path)
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response, AtomicFile(path) as file:
            length = _content_length(response)
            with bar(path.name, length, in_bytes=True) as advance:
                num_bytes, digest = _copy(response, file.stream, advance)
            _check_received(url, path, num_bytes, length, digest, sha256)
    except urllib.error.HTTPError as error:
        with error:
            raise DataError(f"cannot download {url}: the server answers {error.code} {error.reason}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DataError(
            f"cannot download {url} to {path}: {getattr(error, 'reason', None) or error}; "
            "without internet, copy the file there by hand"
        ) from error
    return path


def _check_request(url: str, sha256: str | None) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"cannot download {url!r}: expected an address that begins http:// or https://")
    if sha256 is not None and (len(sha256) != 64 or set(sha256.lower()) - set("0123456789abcdef")):
        raise UsageError(f"sha256 {sha256!r}: expected 64 hexadecimal digits")


def _content_length(response: http.client.HTTPResponse) -> int | None:
    length = response.headers.get("Content-Length")
    return int(length) if length is not None and length.isdecimal() else None


def _copy(source: http.client.HTTPResponse, target: BinaryIO, advance: Advance) -> tuple[int, str]:
    digest = hashlib.sha256()
    num_bytes = 0
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        digest.update(chunk)
        num_bytes += len(chunk)
        advance(len(chunk))
    return num_bytes, digest.hexdigest()


def _check_received(url: str, path: Path, num_bytes: int, length: int | None, digest: str, sha256: str | None) -> None:
    if length is not None and num_bytes != length:
        raise DataError(f"the download of {url} broke off: {num_bytes} of {length} bytes; nothing was kept, try again")
    if sha256 is not None and digest != sha256.lower():
        raise DataError(
            f"{url} is not the expected file: sha256 is {digest}, expected {sha256.lower()}; "
            f"{path} was not written. The file on the server changed, or something between altered it"
        )


def file_sha256(path: Path) -> str:
    """Return the digest of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_file(what: str, names: Sequence[str], folder: Path, command: str) -> Path:
    """Return the first of these files that is in `folder`; an error says what was looked for, where, and the remedy."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    looked_for = " or ".join(names)
    state = "" if folder.is_dir() else ", which does not exist"
    raise DataError(f"{what}: no file {looked_for} in {folder.absolute()}{state}; make it: {command}")
