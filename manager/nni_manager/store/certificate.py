"""The manager's own certificate: nobody signs it, and keepers know it from the workspace.

It is made once for an experiment and never ends, so a resumed manager is the same to its keepers, whatever clocks say.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from trial_keeper.wire.metadata import MANAGER_NAME
from trial_keeper.wire.workspace import replace_file

# What trusts the certificate names it; its dates say nothing. The last one is RFC 5280's for "no end".
_FROM = datetime(2000, 1, 1, tzinfo=timezone.utc)
_TO = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Certificate:
    """A key and its certificate, in one PEM file that its owner alone may read."""

    path: Path
    key_pem: bytes = field(repr=False)
    certificate_pem: str

    @classmethod
    def of(cls, path: Path, names: Iterable[str]) -> Certificate:
        """The one in the file, or, when there is no such file, a new one.

        `names`: hosts and IP addresses for browsers; keepers look for `MANAGER_NAME`.

        Raises:
            OSError: the file can be neither read nor made.
        """
        try:
            text = path.read_text()
        except FileNotFoundError:
            text = _made(names)
            replace_file(path, text.encode(), 0o600)
        key, begin, certificate = text.partition("-----BEGIN CERTIFICATE-----")
        return cls(path, key.encode(), begin + certificate)

    @cached_property
    def sha256(self) -> str:
        """The certificate's fingerprint, as browsers show it: hexadecimal bytes with colons."""
        # Costs 20 ms, which every nnictl would pay.
        import ssl

        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate_pem)).hexdigest().upper()
        return ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))


def _made(names: Iterable[str]) -> str:
    # Costs 60 ms, which only those pay who listen beyond loopback.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, MANAGER_NAME)])
    hosts: list[x509.GeneralName] = [x509.DNSName(MANAGER_NAME)]
    for each in sorted(set(names)):
        try:
            hosts.append(x509.IPAddress(ipaddress.ip_address(each)))
        except ValueError:
            hosts.append(x509.DNSName(each))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        # It signs nothing: who has it can be nobody else.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private.decode() + certificate.public_bytes(serialization.Encoding.PEM).decode()
