"""Downloads a file, completely or not at all.

The file is written under a temporary name and renamed when it has its full length. An interrupted download is not
resumed. Which files a data set has, and their digests, is in `published`.
"""

from __future__ import annotations

import errno
import http.client
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import BinaryIO

from echelon.atomic_file import AtomicFile
from echelon.data.progress import Advance, bar
from echelon.errors import DataError, UsageError

TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 18
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fetch(url: str, path: Path, by_hand: str = "", *, timeout_s: float = TIMEOUT_S) -> None:
    """Download `url` to `path`. An error has the address, the cause, and `by_hand`: how to get the file otherwise."""
    check_address(url)
    remedy = by_hand or f"without internet, copy the file to {path} by hand"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response, AtomicFile(path) as file:
            length = _content_length(response)
            with bar(path.name, length, in_bytes=True) as advance:
                num_bytes = _copy(response, file.stream, advance)
            if length is not None and num_bytes != length:
                received = f"received only {num_bytes} of {length} bytes of {url}"
                raise DataError(f"{received}; nothing was kept, try again; {remedy}")
    except urllib.error.HTTPError as error:
        with error:
            raise DataError(
                f"cannot download {url}: the server responded {error.code} {error.reason}; {remedy}"
            ) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DataError(f"cannot download {url}: {_cause(error)}; {_advice(error, path, remedy)}") from error


def check_address(url: str) -> None:
    """Raise UsageError for anything but a web address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"cannot download {url!r}: expected an address that begins with http:// or https://")


def _cause(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or type(reason).__name__


def _advice(error: Exception, path: Path, remedy: str) -> str:
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"nothing was kept; free some space in {path.parent.absolute()} and try again"
    return remedy


def _content_length(response: http.client.HTTPResponse) -> int | None:
    length = response.headers.get("Content-Length")
    return int(length) if length is not None and length.isdecimal() else None


def _copy(source: http.client.HTTPResponse, target: BinaryIO, advance: Advance) -> int:
    num_bytes = 0
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        num_bytes += len(chunk)
        advance(len(chunk))
    return num_bytes
