"""A server checks its TLS certificate and its key file before it uses these files."""

import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest
from strangers import NOBODY
from tls_files import issue

from nni_manager.client.links import urls_of
from nni_manager.errors import UserError
from nni_manager.experiment import Experiment
from nni_manager.store.folders import ManagerProcess
from nni_manager.support.server_tls import TlsFiles, TlsFilesUnusable


def refusal_of(files):
    with pytest.raises(TlsFilesUnusable) as raised:
        files.read()
    return str(raised.value)


def test_a_valid_certificate_and_key_yield_the_fingerprint_and_host_names_without_a_warning(tmp_path):
    files = issue(tmp_path, ("Lab.example", "*.lab.example", "10.0.0.7"))
    read = files.read()
    printed = subprocess.run(
        ["openssl", "x509", "-in", files.certificate, "-noout", "-fingerprint", "-sha256"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip().partition("=")[2] == read.sha256
    assert (read.hosts, read.warning) == (("lab.example",), "")


@pytest.mark.parametrize("missing", ["certificate", "key"])
def test_the_error_for_a_missing_tls_file_contains_the_option_and_the_path(tmp_path, missing):
    files = issue(tmp_path)
    path = getattr(files, missing)
    path.unlink()
    assert refusal_of(files) == (
        f"cannot use --tls-{missing} {path}: No such file or directory; name a file that this user can read"
    )


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        ("x", None, "--tls-certificate without --tls-key; name both"),
        (None, "x", "--tls-key without --tls-certificate"),
    ],
)
def test_a_tls_certificate_without_a_key_and_a_key_without_a_certificate_are_refused(certificate, key, says):
    with pytest.raises(TlsFilesUnusable, match=says):
        TlsFiles.of(certificate, key)


def test_relative_tls_paths_become_absolute_and_symbolic_links_are_not_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "live.pem").symlink_to("archive.pem")
    assert TlsFiles.of("live.pem", "key.pem") == TlsFiles(tmp_path / "live.pem", tmp_path / "key.pem")


def test_the_key_of_another_certificate_is_refused(tmp_path):
    files, other = issue(tmp_path / "one"), issue(tmp_path / "two")
    assert refusal_of(TlsFiles(files.certificate, other.key)) == (
        f"cannot use --tls-key {other.key}: it is not the key of the first certificate in --tls-certificate; "
        "name the two files that were issued together"
    )


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o644])
def test_a_key_that_other_users_can_access_is_refused_as_in_ssh(tmp_path, mode):
    files = issue(tmp_path)
    files.key.chmod(mode)
    assert (
        f"its mode {mode:04o} lets other users read or change it; run `chmod 600 {files.key}`"
        in refusal_of(files)
    )


def test_a_key_file_of_another_owner_is_accepted_if_only_owner_and_group_can_read_it(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    files = issue(tmp_path)
    os.chown(files.key, NOBODY, 0)
    files.key.chmod(0o440)
    assert files.read().warning == ""
    for mode in (0o460, 0o444):
        files.key.chmod(mode)
        assert f"its mode {mode:04o} lets other users read or change it" in refusal_of(files)


def test_a_file_without_a_pem_certificate_or_without_a_pem_private_key_is_refused(tmp_path):
    files = issue(tmp_path)
    assert "it is no certificate in PEM format" in refusal_of(TlsFiles(files.key, files.key))
    copied = tmp_path / "copied.pem"
    copied.touch(0o600)
    copied.write_bytes(files.certificate.read_bytes())
    assert "it is no private key in PEM format" in refusal_of(TlsFiles(files.certificate, copied))


def test_the_error_for_a_key_with_a_passphrase_contains_the_command_that_removes_the_passphrase(tmp_path):
    files, locked = issue(tmp_path), tmp_path / "locked.pem"
    locked.touch(0o600)
    subprocess.run(
        ["openssl", "pkey", "-in", files.key, "-aes256", "-passout", "pass:x", "-out", locked], check=True
    )
    assert f"write it without one with `openssl pkey -in {locked} -out NEW`" in refusal_of(
        TlsFiles(files.certificate, locked)
    )


def test_the_warning_for_an_expired_certificate_contains_the_expiry_date(tmp_path):
    ended = datetime.now(timezone.utc) - timedelta(days=5)
    warning = issue(tmp_path, start_days=-35, days=30).read().warning
    assert f"expired on {ended:%Y-%m-%d}, and browsers refuse it; renew it" in warning


def test_a_certificate_that_is_not_valid_yet_causes_a_warning(tmp_path):
    assert "is not valid before" in issue(tmp_path, start_days=2).read().warning


def test_importing_nnictl_imports_neither_asyncio_nor_ssl_nor_cryptography():
    program = (
        "import sys, nni_manager.cli.main\n"
        "print([each for each in ('asyncio', 'ssl', 'cryptography') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_first_url_of_a_server_contains_the_host_name_of_the_certificate():
    server = ManagerProcess(1, "0.0.0.0", 8443, "0.7.0", "token", "AB:CD", "/lab", "lab.example")
    first, *others = urls_of(server)
    assert first == "https://lab.example:8443/lab"
    assert "https://127.0.0.1:8443/lab" in others


def test_the_error_for_a_missing_tls_option_uses_the_names_of_the_python_api():
    experiment = Experiment("local")
    experiment.config.trial_command, experiment.config.trial_concurrency = "true", 1
    experiment.config.search_space = {"x": {"_type": "uniform", "_value": [0, 1]}}
    experiment.tls_key = "key.pem"
    with pytest.raises(UserError, match="cannot use tls_key without tls_certificate; name both files"):
        experiment.start()
