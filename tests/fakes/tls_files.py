"""Certificates with their keys in PEM files, as an administrator has them."""

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from nni_manager.support.server_tls import TlsFiles

LOCAL = ("localhost", "127.0.0.1")


def issue(folder: Path, hosts: tuple[str, ...] = LOCAL, start_days: float = -1, days: float = 30) -> TlsFiles:
    """Create a self-signed certificate for these hosts. It is valid for `days`, from `start_days` after now. It replaces the
    existing certificate in the folder.
    """
    folder.mkdir(exist_ok=True)
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "team")])
    start = datetime.now(timezone.utc) + timedelta(days=start_days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_name_of(host) for host in hosts]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for path, content in ((files.key, pem), (files.certificate, certificate.public_bytes(Encoding.PEM))):
        replacement = path.with_suffix(".new")
        replacement.touch(0o600)
        replacement.write_bytes(content)
        replacement.replace(path)
    return files


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
