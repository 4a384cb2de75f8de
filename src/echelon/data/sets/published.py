"""The small sets as their authors publish them: addresses, files and digests, and their download.

A digest is that of the unpacked file, so it does not matter how a mirror compresses it. A file gets its name only after
its digest was checked; until then everything is in a hidden folder, which is always removed.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TypeAlias

from echelon.atomic_file import AtomicFile, partial_folder, remove_abandoned
from echelon.data.progress import bar
from echelon.errors import DataError, UsageError, unknown_name

_Readable: TypeAlias = IO[bytes] | gzip.GzipFile

TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 18
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BROKEN = (OSError, EOFError, zlib.error, tarfile.TarError)


@dataclass(frozen=True, slots=True)
class Archive:
    """A file on the server, .gz or .tar.gz, and the SHA-256 of each file that is needed from it."""

    name: str
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Published:
    """A data set: the address of its archives, and the folder for its files, inside the data folder."""

    name: str
    address: str
    folder: str
    archives: tuple[Archive, ...]


def _gzips(digests: dict[str, str]) -> tuple[Archive, ...]:
    return tuple(Archive(f"{name}.gz", {name: digest}) for name, digest in digests.items())


PUBLISHED = {
    "mnist": Published(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "mnist",
        _gzips(
            {
                "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            }
        ),
    ),
    "fashion-mnist": Published(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "fashion-mnist",
        _gzips(
            {
                "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            }
        ),
    ),
    "cifar10": Published(
        "cifar10",
        "https://www.cs.toronto.edu/~kriz",
        "cifar-10-batches-bin",
        (
            Archive(
                "cifar-10-binary.tar.gz",
                {
                    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
                },
            ),
        ),
    ),
}


def find_published(name: str) -> Published:
    """Return the set with this name."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    raise unknown_name(
        "published data set", name, PUBLISHED, "pack images of your own with: echelon data im2rec PREFIX FOLDER"
    )


def published_as(data: bytes) -> str | None:
    """Return the name of the set that has a file with these contents, because sets share file names."""
    digest = hashlib.sha256(data).hexdigest()
    sets = PUBLISHED.values()
    return next((one.name for one in sets for archive in one.archives if digest in archive.files.values()), None)


def get_command(name: str, data_dir: str | Path) -> str:
    """Return the command that downloads a set."""
    return f"echelon data get {name}" + (f" --data-dir {data_dir}" if str(data_dir) != "data" else "")


def get(published: Published, data_dir: Path, mirror: str | None = None) -> Iterator[tuple[Path, bool]]:
    """Download the missing or wrong files of a set; yield every file, and whether it was downloaded."""
    address = (mirror or published.address).rstrip("/")
    check_address(address)
    folder = data_dir / published.folder
    _make_folder(data_dir)
    remove_abandoned(folder)
    for archive in published.archives:
        is_wrong = any(not _has_digest(folder / name, digest) for name, digest in archive.files.items())
        if is_wrong:
            _get_archive(archive, f"{address}/{archive.name}", folder)
        yield from ((folder / name, is_wrong) for name in archive.files)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create the folder {folder.absolute()}: {error.strerror}; use another --data-dir"
        ) from error


def _has_digest(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == digest


def _get_archive(archive: Archive, url: str, folder: Path) -> None:
    first = folder.absolute() / next(iter(archive.files))
    by_hand = f"get that file elsewhere and unpack it to {first}, or use a mirror: --mirror ADDRESS"
    with partial_folder(folder) as hidden:
        fetch(url, hidden / archive.name, by_hand)
        _unpack(archive, url, hidden, folder)
        _make_folder(folder)
        for wanted in archive.files:
            os.replace(hidden / wanted, folder / wanted)


def _unpack(archive: Archive, url: str, hidden: Path, folder: Path) -> None:
    """Unpack and check the needed files in the hidden folder."""
    missing = dict(archive.files)
    try:
        for name, stream in _members(hidden / archive.name):
            if name in missing:
                _check(url, name, _write(stream, hidden / name), missing.pop(name))
    except _BROKEN as error:
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # an error of the disk; broken archives have no errno
            where = f"cannot unpack {url} in {folder.absolute()}: {error.strerror}"
            room = "; free some space there and try again" if error.errno in _NO_ROOM else ""
            raise DataError(f"{where}; nothing was kept{room}") from error
        raise DataError(f"{url} is not a complete archive: {error}; nothing was kept, try another --mirror") from error
    if missing:
        raise DataError(f"{url} does not contain {', '.join(missing)}; nothing was kept, try another --mirror")


def _members(path: Path) -> Iterator[tuple[str, _Readable]]:
    """Yield (file name, stream) of an archive's files. Paths in the archive are ignored, so they cannot escape."""
    if not path.name.endswith(".tar.gz"):
        with gzip.open(path) as unpacked:
            yield path.stem, unpacked
        return
    with tarfile.open(path, "r|gz") as tar:
        for member in tar:
            if (stream := tar.extractfile(member)) is not None:
                yield PurePosixPath(member.name).name, stream


def _write(stream: _Readable, path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        while chunk := stream.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _check(url: str, name: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise DataError(
            f"{name} from {url} is not the published file: its SHA-256 is {digest}, expected {expected}; "
            "nothing was kept. The server has another file, or it was altered on the way; try another --mirror"
        )


def fetch(url: str, path: Path, by_hand: str = "") -> None:
    """Download a file, completely or not at all. An error says how to get the file `by_hand`."""
    check_address(url)
    remedy = by_hand or f"without internet, copy the file to {path} by hand"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, AtomicFile(path) as file:
            stated = response.headers.get("Content-Length") or ""
            length = int(stated) if stated.isdecimal() else None
            num_bytes = 0
            with bar(path.name, length, in_bytes=True) as advance:
                while chunk := response.read(_CHUNK_BYTES):
                    num_bytes += file.stream.write(chunk)
                    advance(len(chunk))
            if length is not None and num_bytes != length:
                received = f"received only {num_bytes} of {length} bytes of {url}"
                raise DataError(f"{received}; nothing was kept, try again; {remedy}")
    except urllib.error.HTTPError as error:
        with error:
            raise DataError(
                f"cannot download {url}: the server responded {error.code} {error.reason}; {remedy}"
            ) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            remedy = f"nothing was kept; free some space in {path.parent.absolute()} and try again"
        raise DataError(f"cannot download {url}: {_cause(error)}; {remedy}") from error


def check_address(url: str) -> None:
    """Raise UsageError for anything but a web address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"cannot download {url!r}: expected an address that begins with http:// or https://")


def _cause(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or type(reason).__name__
