"""A manager listens on an address beyond loopback, and its keeper connects with TLS. A machine in the middle can read nothing."""

import os
import socket
import subprocess
import sys
import threading

import grpc
import pytest
from deadlines import DEADLINE_S
from fake_manager import TOKEN, Site
from real_experiment import wait_until

from nni_manager.store.certificate import Certificate
from trial_keeper.wire.convert import keeper_messages_to_pb
from trial_keeper.wire.messages import Hello, Stream
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub

TRAIN = """
import nni_sdk as nni
nni.get_next_parameter()
for i in range(20):
    nni.report_intermediate_result(i)
open("gate").read()
nni.report_final_result(1)
"""


@pytest.fixture
def encrypted(silent_site: Site, tmp_path) -> Site:
    """A site whose manager listens with a certificate."""
    silent_site.manager.certificate = Certificate.of(tmp_path / "tls.pem", [])
    silent_site.manager.start()
    silent_site.gate("gate")
    silent_site.add_python_trial(TRAIN)
    return silent_site


class Tap:
    """A TCP proxy that forwards bytes to an address, and records the bytes."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            outer = socket.create_connection(self._to)
            self._sockets += [inner, outer]
            for pair in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return  # The client or the server has closed its connection.

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture
def tapped():
    taps = []

    def tap(address: str) -> Tap:
        taps.append(Tap(address))
        return taps[-1]

    yield tap
    for each in taps:
        each.close()


def doctor(site: Site, **settings) -> str:
    environ = site.environ | site.settings(**settings).to_environ()
    done = subprocess.run(
        [sys.executable, "-m", "trial_keeper", "doctor"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stderr == ""
    return done.stdout


def test_an_eavesdropper_on_a_tls_link_reads_neither_token_nor_metrics(encrypted: Site, tapped) -> None:
    tap = tapped(encrypted.manager.address)
    encrypted.manager.write_document(tap.address)
    keeper = encrypted.start_keeper()
    encrypted.manager.wait_for_bytes(b'"sequence": 19')
    encrypted.open_gate("gate")
    assert keeper.wait() == 0
    assert encrypted.manager.stored() == encrypted.file(Stream.METRICS)
    assert len(tap.seen) > 1000
    assert TOKEN.encode() not in tap.seen
    assert b"PERIODICAL" not in tap.seen


def test_an_eavesdropper_on_a_link_without_tls_reads_token_and_metrics(silent_site: Site, tapped) -> None:
    """This test shows that the previous test would fail without encryption."""
    silent_site.manager.start()
    silent_site.gate("gate")
    silent_site.add_python_trial(TRAIN)
    tap = tapped(silent_site.manager.address)
    silent_site.manager.write_document(tap.address)
    keeper = silent_site.start_keeper()
    silent_site.open_gate("gate")
    assert keeper.wait() == 0
    assert TOKEN.encode() in tap.seen
    assert b"PERIODICAL" in tap.seen


def test_a_keeper_sends_nothing_until_the_manager_presents_the_expected_certificate(
    encrypted: Site, tmp_path
) -> None:
    expected = encrypted.manager.certificate
    encrypted.manager.close()
    # The manager presents another certificate, while manager.json still names the expected one.
    encrypted.manager.certificate = Certificate.of(tmp_path / "other.pem", [])
    encrypted.manager.start()
    encrypted.manager.certificate = expected
    encrypted.manager.write_document()
    keeper = encrypted.start_keeper()
    wait_until(lambda: "lacks the certificate that manager.json names" in keeper.stderr, "the keeper logs it")
    assert encrypted.manager.hellos == 0
    assert "cannot trust" in doctor(encrypted)
    assert encrypted.manager.hellos == 0

    encrypted.manager.close()
    encrypted.manager.start()
    encrypted.open_gate("gate")
    assert keeper.wait() == 0
    assert encrypted.manager.stored() == encrypted.file(Stream.METRICS)


def test_a_keeper_that_expects_a_certificate_sends_nothing_to_a_manager_without_tls(
    encrypted: Site,
) -> None:
    expected = encrypted.manager.certificate
    encrypted.manager.close()
    encrypted.manager.certificate = None
    encrypted.manager.start()
    encrypted.manager.certificate = expected
    encrypted.manager.write_document()
    keeper = encrypted.start_keeper(linger_s=0.0)
    wait_until(lambda: "does not use TLS" in keeper.stderr, "the keeper logs it")
    found = doctor(encrypted)
    assert "FAIL  tls" in found
    assert "FAIL  grpc" in found
    assert encrypted.manager.hellos == 0
    encrypted.open_gate("gate")
    assert keeper.wait() == 0


def test_a_manager_with_a_certificate_refuses_a_keeper_without_tls(encrypted: Site) -> None:
    hello = Hello("0.6.0", "TESTEXPT", "trial1", "main-0")
    with grpc.insecure_channel(encrypted.manager.address) as channel:
        call = KeeperServiceStub(channel).Connect(
            iter([keeper_messages_to_pb([hello])]),
            metadata=((JOB_KEY, "trial1"), (TOKEN_KEY, TOKEN)),
            timeout=DEADLINE_S,
        )
        with pytest.raises(grpc.RpcError):
            next(call)
    assert encrypted.manager.hellos == 0


def test_the_doctor_verifies_the_certificate_of_the_manager_and_connects_to_the_manager(
    encrypted: Site,
) -> None:
    found = doctor(encrypted)
    assert "OK    tls" in found
    assert "OK    grpc" in found
    assert TOKEN not in found


def test_the_token_is_absent_from_the_trial_environment_and_from_all_output_and_files(site: Site) -> None:
    site.add_python_trial("import os, sys; print(dict(os.environ)); print(sys.argv)")
    keeper = site.start_keeper(collect_logs=True, relay_output=True)
    assert keeper.wait() == 0
    assert b"NNI_SYS_DIR" in site.file(Stream.STDOUT)
    said = [keeper.stderr.encode(), keeper.stdout_file.read_bytes()]
    said += [path.read_bytes() for path in site.workspace.root.rglob("*") if path.is_file()]
    assert all(TOKEN.encode() not in text and b"TRIAL_KEEPER_" not in text for text in said)
    assert TOKEN not in repr(site.settings())
    assert os.environ.get("TRIAL_KEEPER_TOKEN") is None
