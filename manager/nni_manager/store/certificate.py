"""The manager's self-signed certificate, which keepers read from the workspace.

It is created once for an experiment and never expires. So keepers accept a resumed manager, whatever the clocks show.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from nni_manager.store.torn_files import read_state
from trial_keeper.wire.metadata import MANAGER_NAME
from trial_keeper.wire.small_files import replace_file

# Clients pin the certificate itself, so its dates are not checked. The last one is RFC 5280's for "no expiration".
_FROM = datetime(2000, 1, 1, tzinfo=timezone.utc)
_TO = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Certificate:
    """A key and its certificate, in one PEM file that only its owner can read."""

    path: Path
    key_pem: bytes = field(repr=False)
    certificate_pem: str

    @classmethod
    def of(cls, path: Path, names: Iterable[str]) -> Certificate:
        """Read the certificate; create a new one if the file is missing or torn. Keepers find the new one in manager.json.

        `names`: hosts and IP addresses for browsers; keepers verify `MANAGER_NAME`.

        Raises:
            OSError: the file can be neither read nor created.
        """
        parts = read_state(path, _parts)
        if parts is None:
            content = _made(names).encode()
            replace_file(path, content, 0o600, is_durable=True)
            parts = _parts(content)
        return cls(path, *parts)

    @cached_property
    def sha256(self) -> str:
        """The certificate's fingerprint, as browsers show it: hexadecimal bytes with colons."""
        # Imported here: it costs 20 ms, which every nnictl would pay.
        import ssl

        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate_pem)).hexdigest().upper()
        return ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))


def _parts(content: bytes) -> tuple[bytes, str]:
    """The key and the certificate of a complete file.

    Raises:
        ValueError: the file is incomplete.
    """
    key, begin, certificate = content.decode("ascii").partition("-----BEGIN CERTIFICATE-----")
    if not key.rstrip().endswith("-----END PRIVATE KEY-----"):
        raise ValueError("its private key is incomplete")
    if not certificate.rstrip().endswith("-----END CERTIFICATE-----"):
        raise ValueError("its certificate is incomplete")
    return key.encode(), begin + certificate


def _made(names: Iterable[str]) -> str:
    # Imported here: it costs 60 ms, and only listeners beyond loopback need it.
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
        # Not a CA: the key's owner cannot issue certificates for other names.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private.decode() + certificate.public_bytes(serialization.Encoding.PEM).decode()
