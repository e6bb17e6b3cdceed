"""Certificates for tests of TLS, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_ca(folder: Path, name: str) -> None:
    """Make NAME.pem and NAME.key, a CA."""
    _openssl(folder, "req", "-x509", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
             "-subj", f"/CN={name}")  # fmt: skip


def make_certificate(folder: Path, name: str, ca: str, subject: str = "", *, names: str = "DNS:localhost") -> None:
    """Make NAME.pem and NAME.key for localhost, signed by a CA of the folder; subject "/" is an empty one."""
    (folder / "extensions").write_text(f"subjectAltName={names}\n" if names else "basicConstraints=CA:FALSE\n")
    _openssl(folder, "req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj",
             subject if subject == "/" else f"/CN={subject or name}")  # fmt: skip
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
             "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "extensions")  # fmt: skip


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
