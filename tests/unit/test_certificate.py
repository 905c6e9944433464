"""The manager's certificate: created once, readable by its owner only, and unchanged by a resume."""

import re
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from deadlines import DEADLINE_S

from nni_manager.store.certificate import Certificate
from trial_keeper.host.trust import verify_certificate
from trial_keeper.wire.metadata import MANAGER_NAME


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate.of(tmp_path / "tls.pem", ["127.0.0.1", "localhost"])


class Server:
    """A server that sends its certificate on every connection. Without a certificate, it sends a line that is not TLS."""

    def __init__(self, certificate: Certificate | None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._context = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(certificate.path)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    if self._context is None:
                        connection.sendall(b"220 mail.example ESMTP\r\n")
                    else:
                        self._context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    continue  # the client has rejected the certificate

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE_S)


@pytest.fixture
def serving():
    servers = []

    def serve(certificate: Certificate | None) -> str:
        servers.append(Server(certificate))
        return servers[-1].address

    yield serve
    for server in servers:
        server.close()


def test_only_the_owner_can_read_the_certificate_file(certificate: Certificate) -> None:
    assert stat.S_IMODE(certificate.path.stat().st_mode) == 0o600
    assert "PRIVATE KEY" in certificate.path.read_text()
    assert "PRIVATE KEY" not in certificate.certificate_pem
    assert "PRIVATE KEY" not in repr(certificate)


def test_a_later_manager_at_another_address_reuses_the_certificate(certificate: Certificate) -> None:
    again = Certificate.of(certificate.path, ["192.0.2.7"])
    assert (again.key_pem, again.certificate_pem) == (certificate.key_pem, certificate.certificate_pem)
    assert again.sha256 == certificate.sha256
    assert len(certificate.sha256.split(":")) == 32


def test_a_server_with_the_expected_certificate_is_trusted(certificate: Certificate, serving) -> None:
    assert verify_certificate(serving(certificate), certificate.certificate_pem, 10) is None


def test_a_server_with_another_certificate_is_not_trusted(
    tmp_path: Path, certificate: Certificate, serving
) -> None:
    other = Certificate.of(tmp_path / "other.pem", ["127.0.0.1", "localhost"])
    address = serving(other)
    found = verify_certificate(address, certificate.certificate_pem, 10)
    assert found is not None
    assert f"{address}: it lacks the certificate that manager.json names" in found


def test_the_certificate_check_rejects_a_server_without_tls(certificate: Certificate, serving) -> None:
    assert "does not use TLS" in str(verify_certificate(serving(None), certificate.certificate_pem, 10))


def test_an_invalid_certificate_is_reported_as_unreadable() -> None:
    assert "cannot read the certificate" in str(verify_certificate("127.0.0.1:9", "nonsense", 10))


def test_a_certificate_check_raises_an_error_if_the_connection_is_refused(certificate: Certificate) -> None:
    with pytest.raises(ConnectionRefusedError):
        verify_certificate("127.0.0.1:9", certificate.certificate_pem, 10)


def test_a_certificate_is_valid_for_its_hosts_and_cannot_issue_certificates(tmp_path: Path) -> None:
    made = Certificate.of(tmp_path / "tls.pem", ["localhost", "192.0.2.7", "2001:db8::7", "localhost"])
    parsed = x509.load_pem_x509_certificate(made.certificate_pem.encode())
    assert made.sha256.replace(":", "") == parsed.fingerprint(hashes.SHA256()).hex().upper()
    assert re.fullmatch("[0-9A-F]{2}(:[0-9A-F]{2}){31}", made.sha256)
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert sorted(names.get_values_for_type(x509.DNSName)) == ["localhost", MANAGER_NAME]
    assert sorted(map(str, names.get_values_for_type(x509.IPAddress))) == ["192.0.2.7", "2001:db8::7"]
    constraints = parsed.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca


def test_a_certificate_whose_key_is_damaged_is_moved_aside_and_replaced(
    tmp_path: Path, certificate: Certificate
) -> None:
    content = certificate.path.read_text()
    certificate.path.write_text(content.replace("-----END PRIVATE KEY-----", "\0" * 25))
    anew = Certificate.of(certificate.path, ["127.0.0.1"])
    assert anew.sha256 != certificate.sha256
    assert (tmp_path / "tls.pem.torn-1").exists()


@pytest.mark.parametrize("part", [0, 0.1, 0.5, 0.99])
def test_a_truncated_certificate_is_moved_aside_and_replaced(
    tmp_path: Path, certificate: Certificate, serving, part
) -> None:
    content = certificate.path.read_bytes()
    certificate.path.write_bytes(content[: int(len(content) * part)])
    anew = Certificate.of(certificate.path, ["127.0.0.1"])
    assert anew.sha256 != certificate.sha256
    assert stat.S_IMODE(anew.path.stat().st_mode) == 0o600
    assert Certificate.of(certificate.path, ["127.0.0.1"]).sha256 == anew.sha256
    assert (tmp_path / "tls.pem.torn-1").exists()
    assert verify_certificate(serving(anew), anew.certificate_pem, 10) is None
