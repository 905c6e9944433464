"""`trial-keeper doctor`: checks everything that a keeper depends on in this container.

The checks are independent: each runs in a thread with a time limit, so storage that hangs or a network that drops packets does
not hide the other findings. A check is skipped if it needs something that another check has already reported as failed.
"""

import contextlib
import json
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from pathlib import Path

from trial_keeper import __version__
from trial_keeper.errors import KeeperError
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.gpus import BindingMissing, GpusUnseen, gpus_here
from trial_keeper.host.mount import check_mounted, check_writing, written_folder
from trial_keeper.programs import foreign_nnictl
from trial_keeper.settings import SettingValue, read_settings
from trial_keeper.wire.convert import MessageInvalid, keeper_messages_to_pb, manager_messages_from_pb
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.listener_uid import UNIX, UntrustedListener, connect, host_and_port, verify_address
from trial_keeper.wire.messages import Hello, Welcome
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.safe_open import UnsafePath
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.versions import mismatch_message, versions_agree
from trial_keeper.wire.workspace import Workspace

# Below the check's own limit, so that the step reports the failure, also on a busy machine.
MAX_STEP_S = 4.5
MAX_CHECK_S = 8.0
# A larger skew only makes the displayed times of a trial wrong.
MAX_SKEW_S = 5.0
_MIB, _GIB = 2**20, 2**30


class CheckResult(str, Enum):
    """The result of a check. A trial can run in spite of WARN."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


# Minimum bytes and inodes. Below the first pair a metric may not fit; below the second a trial's own files may not.
_LEAST_FREE = ((CheckResult.FAIL, 2**24, 100), (CheckResult.WARN, 2**30, 10_000))


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, as one line. `remedy` is empty if no action is needed."""

    check: str
    outcome: CheckResult
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.found}; {self.remedy}" if self.remedy else self.found
        return f"{self.outcome.value:<4}  {self.check:<8}  {' '.join(text.splitlines())}"


# `bounded` sets the name of the check.
_ok, _warn = partial(Finding, "", CheckResult.OK), partial(Finding, "", CheckResult.WARN)
_fail, _skip = partial(Finding, "", CheckResult.FAIL), partial(Finding, "", CheckResult.SKIP)
Check = Callable[[], Finding]
NetworkCheck = Callable[[str, Mapping[str, SettingValue]], Finding]


def report(examined: Iterable[Finding], write: Callable[[str], None], *, as_json: bool) -> int:
    """Write the findings: one line each as soon as it is known, or one JSON document. Returns 1 if a check failed, else 0."""
    findings = []
    for finding in examined:
        findings.append(finding)
        if not as_json:
            write(str(finding))
    failed = sum(finding.outcome is CheckResult.FAIL for finding in findings)
    if as_json:
        write(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False, indent=1))
    else:
        write(f"{failed} of {len(findings)} checks failed" if failed else "no check failed")
    return 1 if failed else 0


def examine(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield all findings, in the order in which a keeper needs the checked things."""
    values, problems = read_settings(environ)
    yield bounded("settings", lambda: check_settings(values, problems))
    yield bounded("bash", check_bash)
    read: list[tuple[ManagerDocument, int]] = []
    root = values.get("workspace")
    if root is None:
        for name in ("mount", "write", "space", "clock", "manager"):
            yield Finding(name, CheckResult.SKIP, "TRIAL_KEEPER_WORKSPACE is not set")
    else:
        workspace = Workspace(Path(str(root)))
        mount = Path(str(values.get("mount") or root))
        yield bounded("mount", lambda: check_mount(mount, workspace))
        trial_id = str(values["trial_id"]) if "trial_id" in values else None
        yield bounded("write", lambda: check_write(written_folder(workspace, trial_id)))
        yield bounded("space", lambda: check_space(workspace.root))
        yield bounded("clock", lambda: check_clock(workspace.root))
        yield bounded("manager", lambda: check_manager_document(workspace, values, read.append))
    if not read:
        for name in ("version", "name", "tcp", "tls", "grpc"):
            yield Finding(name, CheckResult.SKIP, "no manager.json names the manager")
    else:
        ((document, manager_uid),) = read
        is_asked = values.get("version_check", True) is True
        yield bounded("version", lambda: check_version(document.version, is_asked=is_asked))
        network_checks: tuple[tuple[str, NetworkCheck], ...] = (
            ("name", check_name),
            ("tcp", check_tcp),
            ("tls", partial(check_tls, document.certificate)),
            ("grpc", partial(check_service, document.certificate, manager_uid)),
        )
        for name, check in network_checks:
            yield from at_each(name, check, document.addresses, values)
    yield bounded("gpu", check_gpus)
    yield bounded("nnictl", check_nnictl)


def bounded(name: str, check: Check, limit_s: float = MAX_CHECK_S) -> Finding:
    """Run the check with a time limit. A timeout or an exception becomes a failed finding."""
    found: queue.SimpleQueue[Finding] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(check())
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            found.put(_fail(f"the check itself failed: {error!r}", "report this bug of trial-keeper"))

    # A daemon thread: a check that hangs must not block the exit.
    threading.Thread(target=run, name=f"doctor {name}", daemon=True).start()
    try:
        finding = found.get(timeout=limit_s)
    except queue.Empty:
        finding = _fail(
            f"no result within {limit_s:g} s", "check whether the shared storage or the network hangs"
        )
    return replace(finding, check=name)


# ---- this container


def check_settings(values: Mapping[str, SettingValue], problems: Iterable[str]) -> Finding:
    """Check the settings in the environment. The token is not shown."""
    if wrong := "; ".join(problems):
        return _fail(
            wrong,
            "run the doctor in the job's own environment, for example with `kubectl exec`; `nnictl help doctor` describes it",
        )
    return _ok(
        f"experiment {values['experiment_id']}, job {values['job_id']}, workspace {values['workspace']}"
        + (f", mount {values['mount']}" if values.get("mount") else ""),
    )


def check_bash() -> Finding:
    """Check that a trial's command can be started."""
    path = shutil.which("bash")
    if path is None:
        return _fail("there is no bash on the PATH", "use an image that has bash")
    command = [path, "-e", "-o", "pipefail", "-c", 'echo "$BASH_VERSION"']
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_STEP_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return _fail(f"{path} does not work: {error}", "repair bash in the image")
    return _ok(f"{path}, version {done.stdout.strip()}")


def check_nnictl() -> Finding:
    """Name a command of another package that hides ours."""
    foreign = foreign_nnictl()
    if foreign is None:
        return _ok("no other package's nnictl hides that of trial-keeper")
    return _warn(
        f"{foreign}, which a shell finds first, is another package's", "write `trial-keeper ctl` for `nnictl`"
    )


def check_gpus() -> Finding:
    """List the visible GPUs. None is no failure: most trials need none."""
    # The second is that of all AMD GPUs.
    devices = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    try:
        gpus = gpus_here()
    except BindingMissing as error:
        return _of_text(CheckResult.WARN if devices else CheckResult.SKIP, str(error))
    except GpusUnseen as error:
        return _of_text(CheckResult.FAIL if devices else CheckResult.SKIP, str(error))
    if not len(gpus):
        return _skip("the driver shows no GPU")
    return _ok(f"{len(gpus)}: {', '.join(gpus.names())}")


# ---- the shared storage


def check_mount(mount: Path, workspace: Workspace) -> Finding:
    """Check that the shared storage has the experiment's folder and is readable, with the keeper's own check."""
    try:
        check_mounted(mount, workspace)
    except KeeperError as error:
        return _of_keeper_error(error)
    return _ok(f"{workspace.root} is there, on {_file_system(workspace.root)}")


def check_write(folder: Path) -> Finding:
    """Check that this user can create and remove files in the folder, and report the owner of such files."""
    try:
        owner = check_writing(folder).st_uid
        folder_owner = folder.stat().st_uid
    except KeeperError as error:
        return _of_keeper_error(error)
    own = os.geteuid()
    if owner != own:
        return _warn(
            f"files that user {own} creates on the storage belong to user {owner}: the server maps users",
            f"if a trial cannot read its own files, run the container as user {owner} or export without squashing",
        )
    return _ok(f"user {own} can create and remove files; the folder belongs to user {folder_owner}")


def check_space(root: Path) -> Finding:
    """Check the free space for a trial's files."""
    try:
        status = os.statvfs(root)
    except OSError as error:
        return _skip(f"cannot examine {root}: {error.strerror}")
    free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    # Some file systems allocate inodes on demand, and report a count of 0.
    inodes = status.f_favail if status.f_files else None
    found = f"{_size(free)} of {_size(whole)} free"
    if inodes is not None:
        found += f", {inodes} inodes free"
    for outcome, least_bytes, least_inodes in _LEAST_FREE:
        if free < least_bytes or (inodes is not None and inodes < least_inodes):
            return Finding("", outcome, found, "remove files that are not needed, or request more quota")
    return _ok(found)


def check_clock(root: Path) -> Finding:
    """Measure this clock's skew from the shared storage's clock, with a new file."""
    before_s = time.time()
    try:
        written_s = check_writing(root).st_mtime
    except KeeperError as error:
        cause = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        return _skip(f"cannot write a file to compare the clocks: {cause}")
    return clock_finding(before_s, written_s, time.time())


def clock_finding(before_s: float, written_s: float, after_s: float) -> Finding:
    """The finding for a file with the time `written_s`, written between two readings of this container's clock."""
    skew_s = max(written_s - after_s, 0.0) - max(before_s - written_s, 0.0)
    which = "ahead of" if skew_s < 0 else "behind"
    found = f"{abs(skew_s):.1f} s {which} the shared storage's"
    if abs(skew_s) > MAX_SKEW_S:
        return _warn(
            found,
            "synchronise both machines with NTP; until then the times of trials are wrong",
        )
    return _ok(found)


def _file_system(path: Path) -> str:
    """Return the type and source of the file system that holds the path."""
    import psutil  # not at the top: the import takes 15 ms, and only this check needs it

    real = path.resolve()
    with contextlib.suppress(OSError, ValueError):  # no /proc, or no mount
        mounts = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
        # A later mount on the same point hides the earlier one.
        found = max(reversed(mounts), key=lambda each: len(each.mountpoint))
        return f"{found.fstype} ({found.device})"
    return "an unknown file system"


# ---- the manager


def check_manager_document(
    workspace: Workspace,
    values: Mapping[str, SettingValue],
    keep: Callable[[tuple[ManagerDocument, int]], None],
) -> Finding:
    """Check that manager.json names the address of this experiment's manager. `keep` receives it with its owner's uid."""
    path = workspace.manager_json
    remedy = "run `nnictl resume` so that the manager writes it again"
    try:
        document, manager_uid = workspace.read_manager_json()
        keep((document, manager_uid))
    except FileNotFoundError:
        return _fail(
            f"there is no {path}",
            "check that the mounted folder is the experiment's; if so, " + remedy,
        )
    except UnsafePath as error:
        return _fail(
            f"cannot read {path}: {error.strerror}", f"remove it, check who may write there, and {remedy}"
        )
    except OSError as error:
        return _fail(f"cannot read {path}: {error.strerror}", f"let user {os.geteuid()} read it")
    except DocumentInvalid as error:
        return _fail(str(error), remedy)
    found = f"version {document.version} at {' or '.join(document.addresses)}"
    if document.certificate is not None:
        found += ", with a certificate"
    wanted = values.get("experiment_id", document.experiment_id)
    if document.experiment_id != wanted:
        return _fail(
            f"{path} belongs to experiment {document.experiment_id}, but this job to {wanted}",
            "mount the experiment's own folder",
        )
    return _ok(found)


def check_version(manager: str, *, is_asked: bool) -> Finding:
    """Apply the version rule, as a keeper does before it starts a trial."""
    found = f"keeper {__version__}, manager {manager}"
    if versions_agree(manager, __version__):
        return _ok(found)
    if not is_asked:
        return _ok(f"{found}; they differ, and versionCheck is false")
    return _of_text(CheckResult.FAIL, mismatch_message(manager, __version__))


def check_name(address: str, _: Mapping[str, SettingValue]) -> Finding:
    """Resolve the manager's host name."""
    if address.startswith(UNIX):
        return _skip(f"{address} needs no name resolution")
    host, port = host_and_port(address)
    try:
        numbers = sorted(
            {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        )
    except (socket.gaierror, UnicodeError) as error:
        return _fail(
            f"cannot resolve {host}: {error.strerror if isinstance(error, OSError) else error}",
            "fix DNS in this container, or configure an address of the manager that this container can resolve",
        )
    if numbers == [host]:
        return _skip(f"{host} needs no name resolution")
    return _ok(f"{host} is {', '.join(numbers)}")


def check_tcp(address: str, _: Mapping[str, SettingValue]) -> Finding:
    """Connect to the manager's address."""
    began_s = time.monotonic()
    try:
        with connect(address, MAX_STEP_S):
            return _ok(f"connected to {address} in {1000 * (time.monotonic() - began_s):.1f} ms")
    except ConnectionRefusedError:
        return _fail(
            f"{address} refuses connections: the machine responds, but no program listens on the port",
            "check that the manager runs (`nnictl resume` starts it again) and listens on an address for other machines",
        )
    except TimeoutError:
        return _fail(
            f"{address} does not respond within {MAX_STEP_S:g} s",
            "open this port between container and manager in firewalls and network policies",
        )
    except OSError as error:
        return _fail(
            f"cannot reach {address}: {error.strerror or error}",
            "check the result of `name` above, and the network's routes",
        )


def check_tls(certificate: str | None, address: str, _: Mapping[str, SettingValue]) -> Finding:
    """Check that the listener has the certificate that manager.json names."""
    if certificate is None:
        return _skip("manager.json names no certificate: the connection is not encrypted")
    from trial_keeper.host.trust import verify_certificate

    try:
        problem = verify_certificate(address, certificate, MAX_STEP_S)
    except OSError:
        return _skip(f"no server responds at {address}")
    if problem is None:
        return _ok(f"{address} has the certificate that manager.json names")
    return _fail(
        problem,
        "check which program listens there, and proxies on the way; `nnictl resume` writes manager.json again",
    )


def check_service(
    certificate: str | None, manager_uid: int, address: str, values: Mapping[str, SettingValue]
) -> Finding:
    """Check that the manager accepts this job's keeper. The session of the running keeper is not affected."""
    missing = [name for name in ("experiment_id", "job_id", "token") if name not in values]
    if missing:
        return _skip(f"cannot send Hello without {', '.join(missing)}")
    import grpc  # not at the top: the import takes 80 ms, and only this check needs it

    from trial_keeper.host.link import open_channel
    from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub

    if certificate is not None:
        found = check_tls(certificate, address, values)
        if found.outcome is CheckResult.FAIL:
            return found
    else:
        # The connection itself reports an address without a listener.
        with contextlib.suppress(ConnectionRefusedError):
            try:
                verify_address(address, [manager_uid])
            except UntrustedListener as error:
                return _fail(str(error), "run `nnictl resume`, which starts the manager on a port of its own")
    job_id, token = str(values["job_id"]), str(values["token"])
    hello = Hello(__version__, str(values["experiment_id"]), job_id, "doctor", is_probe=True)
    began_s = time.monotonic()
    # The call carries the token, so only after the listener has been verified.
    with open_channel(grpc, address, certificate) as channel:
        call = KeeperServiceStub(channel).Connect(
            iter([keeper_messages_to_pb([hello])]),
            metadata=((JOB_KEY, job_id), (TOKEN_KEY, token)),
            timeout=MAX_STEP_S,
        )
        try:
            answer, *_ = manager_messages_from_pb(next(call))
        except grpc.RpcError as error:
            return _refusal(address, error)
        except (StopIteration, MessageInvalid):
            answer = None
    if not isinstance(answer, Welcome):
        return _fail(f"{address} is not a manager", "check which program listens there")
    took_ms = 1000 * (time.monotonic() - began_s)
    return _ok(f"manager {answer.version} at {address} accepted job {job_id} in {took_ms:.0f} ms")


def _refusal(address: str, error: Exception) -> Finding:
    import grpc

    if not isinstance(error, grpc.Call):
        raise error
    code, details = error.code(), error.details() or ""
    refusals = {
        grpc.StatusCode.UNAUTHENTICATED: "token",
        grpc.StatusCode.FAILED_PRECONDITION: "version",
        grpc.StatusCode.NOT_FOUND: "job",
    }
    if code in refusals:
        return _of_text(CheckResult.FAIL, f"the {refusals[code]} is refused by {address}: {details}")
    return _fail(
        f"no Welcome from {address}: {code.name} {details}",
        "check `tcp` above; if that is OK, another program listens there, or a proxy interferes",
    )


def at_each(
    name: str,
    check: NetworkCheck,
    addresses: Iterable[str],
    values: Mapping[str, SettingValue],
) -> list[Finding]:
    """Run the check at each address. A keeper tries all addresses in turn, so if one works, failures at others only WARN."""
    findings = [bounded(name, lambda address=address: check(address, values)) for address in addresses]  # type: ignore[misc]
    one_serves = any(finding.outcome is CheckResult.OK for finding in findings)
    return [
        replace(finding, outcome=CheckResult.WARN)
        if one_serves and finding.outcome is CheckResult.FAIL
        else finding
        for finding in findings
    ]


# ---- texts


def _of_keeper_error(error: KeeperError) -> Finding:
    found, _, remedy = str(error).partition("; ")
    return _fail(f"{found} (a keeper ends with {int(error.exit_code)})", remedy)


def _of_text(outcome: CheckResult, text: str) -> Finding:
    """Split one of the keeper's messages, which end with the remedy, into a finding."""
    found, _, remedy = text.partition("; ")
    return Finding("", outcome, found, remedy)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes / _MIB:.1f} MiB"
