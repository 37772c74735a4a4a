"""Certificates for tests, created at run time: an authority, a server on loopback, a client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates for 127.0.0.1, which serve as a server's and as a client's."""

    directory: Path
    files: CertificateFiles
    signer: trustme.CA

    @classmethod
    def create(cls, directory: Path, name: str = "authority") -> Authority:
        signer = trustme.CA(organization_name=name)
        files = CertificateFiles(directory / f"{name}.pem", directory / f"{name}.key")
        signer.cert_pem.write_to_path(files.certificate)
        signer.private_key_pem.write_to_path(files.key)
        return cls(directory, files, signer)

    def sign(self, name: str) -> CertificateFiles:
        leaf = self.signer.issue_cert("127.0.0.1", "localhost", common_name=name)
        files = CertificateFiles(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        leaf.cert_chain_pems[0].write_to_path(files.certificate)
        leaf.private_key_pem.write_to_path(files.key)
        return files
