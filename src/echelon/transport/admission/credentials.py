"""The secret of a job: a private key and its self-signed certificate, which all processes of the job have.

A launcher creates credentials and hands them over in the variable ECHELON_CREDENTIALS of each process. A process that
was started by hand without that variable reads the file that ECHELON_CREDENTIALS_FILE names, or else the user's own
file, which the first process creates. `Security` adds how connections are protected:

    security       between machines      on one machine
    auto           TLS 1.3               proof of the secret
    proof          proof of the secret   proof of the secret     (--no-encryption)
    none           nothing               nothing                 (--insecure)
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from echelon.environment import CREDENTIALS, CREDENTIALS_FILE, Job, user_configuration
from echelon.errors import UsageError

FILE_NAME = "credentials"
_SEPARATOR = "."
_KEY_NAME = "PRIVATE KEY"
_CERTIFICATE_NAME = "CERTIFICATE"


@dataclass(frozen=True, repr=False)
class Credentials:
    """An Ed25519 private key and its certificate, both in DER. Equal for all processes of a job."""

    key: bytes
    certificate: bytes

    @classmethod
    def create(cls) -> Credentials:
        """Return new credentials. Only this function needs the package `cryptography`, which takes a while to import.

        The certificate is valid at any time, so that a wrong clock does not matter: it is only compared, and it is
        forgotten with the job.
        """
        from datetime import datetime

        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "echelon job")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime(2000, 1, 1))
            .not_valid_after(datetime(9999, 12, 31))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, None)
        )
        encoding = serialization.Encoding.DER
        private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return cls(private, certificate.public_bytes(encoding))

    @classmethod
    def parse(cls, text: str, where: str) -> Credentials:
        """Return the credentials of `to_text`. `where` names their source in errors; the secret is never shown."""
        parts = text.strip().split(_SEPARATOR)
        try:
            key, certificate, check = (base64.b64decode(part, validate=True) for part in parts)
            if check == _check(key, certificate):
                return cls(key, certificate)
        except ValueError:
            pass
        raise UsageError(
            f"{where} does not hold credentials of Echelon ({len(text)} characters): it is damaged or incomplete; "
            "copy it again, or remove it, so that the next start makes new credentials"
        )

    def to_text(self) -> str:
        """Return the credentials as one line without spaces, for an environment variable or a file."""
        parts = self.key, self.certificate, _check(self.key, self.certificate)
        return _SEPARATOR.join(base64.b64encode(part).decode() for part in parts)

    @cached_property
    def secret(self) -> bytes:
        """32 bytes that only processes of the job know, for HMACs."""
        return hashlib.sha256(b"echelon secret" + self.key).digest()

    def derive(self, purpose: str) -> str:
        """Return a text that only processes of the job know, one per purpose. It does not reveal the secret."""
        return hashlib.blake2b(purpose.encode(), key=self.secret, digest_size=16).hexdigest()

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """Return settings for TLS 1.3 in which both sides present this certificate and accept no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate names the job; addresses may be anything
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        if server_side:
            context.num_tickets = 0  # a resumed session would not present the certificate
        pem = _pem(_KEY_NAME, self.key) + _pem(_CERTIFICATE_NAME, self.certificate)
        with os.fdopen(os.memfd_create("credentials", os.MFD_CLOEXEC), "wb", buffering=0) as file:
            file.write(pem.encode())  # ssl reads a key only from a file; this one is memory of this process
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


@dataclass(frozen=True, repr=False)
class Security:
    """How the connections of a process are protected. See the table at the top of this module."""

    policy: str
    credentials: Credentials | None

    @classmethod
    def of(cls, job: Job) -> Security:
        """Return the security of a job. All connections of a process share it."""
        return _security(job.security, job.credentials, job.credentials_file)

    @property
    def secret(self) -> bytes:
        """The secret of the job; empty without credentials."""
        return self.credentials.secret if self.credentials else b""

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        """The settings of TLS for connections that this process opens."""
        assert self.credentials is not None
        return self.credentials.context(server_side=False)

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        """The settings of TLS for connections that this process accepts."""
        assert self.credentials is not None
        return self.credentials.context(server_side=True)


INSECURE = Security("none", None)


@lru_cache(maxsize=16)
def _security(policy: str, text: str | None, file: str | None) -> Security:
    if policy == "none":
        return INSECURE
    if text:
        return Security(policy, Credentials.parse(text, f"the variable {CREDENTIALS}"))
    return Security(policy, read_credentials(Path(file)) if file else user_credentials())


def with_credentials(job: Job) -> Job:
    """Return a job whose processes get their credentials from the launcher: those of the job, or new ones."""
    if job.security == "none" or job.credentials:
        return job
    credentials = read_credentials(Path(job.credentials_file)) if job.credentials_file else Credentials.create()
    return replace(job, credentials=credentials.to_text(), credentials_file=None)


def user_credentials() -> Credentials:
    """Return the credentials of this user, for jobs that no launcher has started. The first call creates the file."""
    path = user_configuration() / FILE_NAME
    if not path.exists():
        write_credentials(path, Credentials.create())
    return read_credentials(path)


def write_credentials(path: Path, credentials: Credentials) -> None:
    """Write a file that only this user can read. If another process has created it meanwhile, that one stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(number, "w") as file:
                file.write(credentials.to_text() + "\n")
            with suppress(FileExistsError):
                os.link(partial, path)
        finally:
            partial.unlink()
    except OSError as error:
        raise UsageError(
            f"credentials cannot be written to {path}: {error.strerror}; set {CREDENTIALS_FILE} to a file that all "
            "processes of the job can read, or start the job with 'echelon launch'"
        ) from error


def read_credentials(path: Path) -> Credentials:
    """Return the credentials in a file, which must be readable by its owner only."""
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1 << 16)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the credentials file {path} cannot be read: {error}") from error
    if mode & 0o077:
        raise UsageError(
            f"the credentials file {path} has mode {mode:04o}, so other users may have read it; make it yours alone "
            f"with 'chmod 600 {path}', or delete it, so that the next start creates a new one"
        )
    return Credentials.parse(text, f"the file {path}")


def _check(key: bytes, certificate: bytes) -> bytes:
    """Return bytes that detect a damaged text."""
    return hashlib.sha256(key + certificate).digest()[:6]


def _pem(name: str, der: bytes) -> str:
    return f"-----BEGIN {name}-----\n{base64.encodebytes(der).decode()}-----END {name}-----\n"
