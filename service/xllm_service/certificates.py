"""TLS for the server, with certificates that are read again when their files change.

Every new connection looks at the files' change times, and one that finds them changed reads them. What does not fit
together, as in the middle of a replacement, is left alone and told once: the certificates before go on.
"""

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from xllm_service.logs import get_logger

_log = get_logger("tls")

# What tells a file from what was there before: change time, size, and the inode, as a rename keeps the other two.
_Stamp = tuple[tuple[int, int, int], ...]


class CertificateError(Exception):
    """Certificate files that cannot be used; the message names the flag and says why."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where a server's certificates lie, in PEM.

    Attributes:
        cert: its own chain.
        key: the key of that chain.
        client_ca: whose clients it takes; None: whoever connects.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def _paths(self) -> list[Path]:
        return [self.cert, self.key, *([self.client_ca] if self.client_ca is not None else [])]

    def stamp(self) -> _Stamp:
        """Return what changes when one of the files does. Raises OSError."""
        found = [os.stat(path) for path in self._paths()]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read and check them. Raises CertificateError."""
        try:
            cert, key = self.cert.read_bytes(), self.key.read_bytes()
            authority = self.client_ca.read_bytes() if self.client_ca is not None else None
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # note: an empty password, or OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.cert, self.key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise CertificateError(
                f"--tls-cert {self.cert} and --tls-key {self.key}: not a certificate in PEM and its key without a "
                f"password ({_why(error)})"
            ) from None
        if authority is not None:
            try:
                context.load_verify_locations(cadata=authority.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise CertificateError(
                    f"--tls-client-ca {self.client_ca}: not a certificate in PEM ({_why(error)})"
                ) from None
        return grpc.ssl_server_certificate_configuration([(key, cert)], authority)


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error).lower().replace("_", " ")


class ReloadingCertificates:
    """The certificates of a server's lifetime.

    Args:
        files: where they lie; read now. Raises CertificateError.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        try:
            self._seen = files.stamp()
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}") from None
        self._first = files.read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with."""
        fetch: Any = self._fetch  # its stubs leave out that None is an answer
        return grpc.dynamic_ssl_server_credentials(
            self._first, fetch, require_client_authentication=self._files.client_ca is not None
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates for a connection that begins, None where they are those before.

        Runs on threads of gRPC's own, and must not raise: that would refuse the connection.
        """
        with self._lock:
            try:
                stamp = self._files.stamp()
                if stamp == self._seen:
                    return None
                self._seen = stamp
                found = self._files.read()
                if self._files.stamp() != stamp:  # changed while they were read: the next connection looks again
                    self._seen = ()
                    return None
            except (CertificateError, OSError) as error:
                _log.error("the certificates changed and cannot be used; those before go on: %s", error)
                return None
            _log.info("the certificates changed and are in use for new connections")
            return found
