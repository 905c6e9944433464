"""The findings of trial-keeper doctor."""

import json
import threading

import pytest

from trial_keeper import __version__
from trial_keeper.host import doctor
from trial_keeper.host.doctor import CheckResult, Finding
from trial_keeper.wire.workspace import Workspace

CHECKS = [
    "settings",
    "bash",
    "mount",
    "write",
    "space",
    "clock",
    "manager",
    "version",
    "name",
    "tcp",
    "tls",
    "grpc",
    "gpu",
    "nnictl",
]

FIRST_TWO = ".".join(__version__.split(".")[:2])


def outcomes(findings):
    return [finding.outcome for finding in findings]


# ---- all checks


def test_doctor_lists_all_checks_and_runs_the_independent_checks_if_it_gets_no_settings():
    findings = list(doctor.examine({}))
    assert [finding.check for finding in findings] == CHECKS
    by_name = {finding.check: finding for finding in findings}
    assert by_name["settings"].outcome is CheckResult.FAIL
    assert "TRIAL_KEEPER_TOKEN is not set" in by_name["settings"].found
    assert by_name["bash"].outcome is CheckResult.OK
    assert {by_name[name].outcome for name in CHECKS[2:-1]} == {CheckResult.SKIP}


def test_a_finding_of_the_doctor_command_is_one_line_that_ends_with_the_remedy():
    finding = Finding("mount", CheckResult.FAIL, "cannot enter\n/mnt", "mount it")
    assert str(finding) == "FAIL  mount     cannot enter /mnt; mount it"
    assert str(Finding("tcp", CheckResult.OK, "fine")) == "OK    tcp       fine"


def test_an_exception_in_a_check_does_not_prevent_the_remaining_checks():
    def broken():
        raise ZeroDivisionError("oops")

    finding = doctor.bounded("clock", broken)
    assert (finding.outcome, "oops" in finding.found) == (CheckResult.FAIL, True)


def test_a_check_fails_after_a_timeout_if_it_hangs():
    released = threading.Event()
    try:
        finding = doctor.bounded("mount", released.wait, limit_s=0.05)
    finally:
        released.set()
    assert finding.outcome is CheckResult.FAIL
    assert finding.found == "no result within 0.05 s"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([CheckResult.FAIL, CheckResult.FAIL], [CheckResult.FAIL, CheckResult.FAIL]),
        ([CheckResult.FAIL, CheckResult.OK], [CheckResult.WARN, CheckResult.OK]),
        (
            [CheckResult.OK, CheckResult.FAIL, CheckResult.SKIP],
            [CheckResult.OK, CheckResult.WARN, CheckResult.SKIP],
        ),
        ([CheckResult.SKIP, CheckResult.FAIL], [CheckResult.SKIP, CheckResult.FAIL]),
    ],
)
def test_the_connection_check_passes_if_one_address_is_reachable(answers, expected):
    by_address = {f"host{number}:1": outcome for number, outcome in enumerate(answers)}
    findings = doctor.at_each(
        "tcp", lambda address, _: Finding("tcp", by_address[address], address), by_address, {}
    )
    assert outcomes(findings) == expected
    assert [finding.found for finding in findings] == list(by_address)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_is_1_if_a_check_failed(as_json):
    for outcome, code in (
        (CheckResult.OK, 0),
        (CheckResult.WARN, 0),
        (CheckResult.SKIP, 0),
        (CheckResult.FAIL, 1),
    ):
        lines = []
        assert doctor.report([Finding("bash", outcome, "é", "r")], lines.append, as_json=as_json) == code
        if as_json:
            assert json.loads(lines[0]) == [
                {"check": "bash", "outcome": outcome.value, "found": "é", "remedy": "r"}
            ]
        else:
            assert lines[-1] == ("1 of 1 checks failed" if code else "no check failed")


# ---- single checks


@pytest.mark.parametrize(
    ("written_s", "outcome", "words"),
    [
        (100.5, CheckResult.OK, "0.0 s"),
        (104.0, CheckResult.OK, "3.0 s behind"),
        (98.0, CheckResult.OK, "2.0 s ahead of"),
        (107.0, CheckResult.WARN, "6.0 s behind"),
        (40.0, CheckResult.WARN, "60.0 s ahead of"),
    ],
)
def test_doctor_compares_the_local_clock_with_the_clock_of_the_storage(written_s, outcome, words):
    finding = doctor.clock_finding(100.0, written_s, 101.0)
    assert (finding.outcome, words in finding.found) == (outcome, True)


def test_slow_storage_is_not_reported_as_clock_skew():
    assert doctor.clock_finding(100.0, 130.0, 140.0).found.startswith("0.0 s")


@pytest.mark.parametrize(
    ("manager", "is_asked", "outcome"),
    [
        (f"{FIRST_TWO}.99", True, CheckResult.OK),
        (f"{FIRST_TWO}0.0", True, CheckResult.FAIL),
        (f"{FIRST_TWO}0.0", False, CheckResult.OK),
        ("0.5.0", True, CheckResult.OK),
    ],
)
def test_doctor_applies_the_version_compatibility_rule_of_the_keeper(manager, is_asked, outcome):
    finding = doctor.check_version(manager, is_asked=is_asked)
    assert finding.outcome is outcome
    assert manager in finding.found
    assert ("pip install" in finding.remedy) == (outcome is CheckResult.FAIL)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70])
def test_an_unknown_host_name_fails_the_name_check(host):
    finding = doctor.check_name(f"{host}:80", {})
    assert finding.outcome is CheckResult.FAIL
    assert host in finding.found


def test_the_name_check_is_skipped_for_an_ip_address():
    assert doctor.check_name("127.0.0.1:80", {}).outcome is CheckResult.SKIP
    assert doctor.check_name("[::1]:80", {}).outcome is CheckResult.SKIP
    assert doctor.check_name("localhost:80", {}).outcome is CheckResult.OK


def test_the_workspace_checks_of_doctor_leave_no_files(tmp_path):
    workspace = Workspace(tmp_path)
    workspace.manager_json.touch()
    assert doctor.check_mount(tmp_path, workspace).outcome is CheckResult.OK
    assert doctor.check_write(tmp_path).outcome is CheckResult.OK
    assert doctor.check_clock(tmp_path).outcome is CheckResult.OK
    assert list(tmp_path.iterdir()) == [workspace.manager_json]


def test_a_missing_or_broken_bash_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_bash().outcome is CheckResult.FAIL
    bash = tmp_path / "bash"
    bash.write_text("#!/bin/sh\nexit 3\n")
    bash.chmod(0o755)
    finding = doctor.check_bash()
    assert (finding.outcome, "3" in finding.found) == (CheckResult.FAIL, True)
    bash.write_bytes(b"\x00\x01no program")
    assert doctor.check_bash().outcome is CheckResult.FAIL
