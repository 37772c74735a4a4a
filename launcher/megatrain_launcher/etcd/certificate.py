"""A certificate for the job's own etcd when other hosts reach it: server and clients share it, and trust nothing else.

A password is not enough: an etcd that asks for one still answers some calls without it, and one of these (an alarm)
ends its password checks (ADR 0038, measured). A client without the certificate's key fails in the handshake.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.whole_files import write_private
from megatrain_job.coordination.settings import TlsFiles

_BEFORE = timedelta(days=1)
"""Also accepted by hosts whose clocks are behind."""
_VALID = timedelta(days=3650)


def make_certificate(files: TlsFiles, address: str) -> None:
    """Write a new certificate for an IP address, and its key, to the places that `files` names.

    Raises: ConfigError if the package that makes it is missing; OSError.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        problem = "an etcd of the job's own that other hosts reach needs the package cryptography"
        raise ConfigError(
            [f"{problem}: pip install 'megatrain[launcher]', or name an etcd by --rdzv-endpoint=HOST:PORT"]
        ) from error
    assert files.certificate is not None
    assert files.key is not None
    key = ec.generate_private_key(ec.SECP256R1())
    # no common name: etcd takes it for a user name, and refuses requests that, like ours, name their user by a password
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "etcd of a megatrain job")])
    now = datetime.now(UTC)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - _BEFORE, now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(files.key, secret)
    write_private(files.certificate, certificate.public_bytes(pem))
