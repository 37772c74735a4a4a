"""Certificates for tests, made on the spot by the `openssl` program: an authority, a server on loopback, a client."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.require import require

_USES = "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates for 127.0.0.1, which serve as a server's and as a client's."""

    directory: Path
    files: CertificateFiles

    @classmethod
    def create(cls, directory: Path, name: str = "authority") -> Authority:
        require("openssl", found=shutil.which("openssl") is not None, reason="not installed")
        files = CertificateFiles(directory / f"{name}.pem", directory / f"{name}.key")
        _openssl(
            "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}",
            "-keyout", str(files.key), "-out", str(files.certificate),
        )  # fmt: skip
        return cls(directory, files)

    def sign(self, name: str) -> CertificateFiles:
        files = CertificateFiles(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        request, uses = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        uses.write_text(_USES)
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(files.key), "-out", str(request))
        _openssl(
            "x509", "-req", "-days", "2", "-in", str(request), "-extfile", str(uses), "-CAcreateserial",
            "-CA", str(self.files.certificate), "-CAkey", str(self.files.key), "-out", str(files.certificate),
        )  # fmt: skip
        return files


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
