"""A keeper with shared storage that is missing, late, forbidden, read-only or full; and the code snapshot."""

import gzip
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from attempts import attempt_id
from deadlines import scaled_s
from fake_manager import EXPERIMENT, KEY, TRIAL
from real_experiment import wait_until

from nni_manager.engine.code_snapshot import take_snapshot
from trial_keeper.errors import CodeDamaged
from trial_keeper.host.mount import unpack_code
from trial_keeper.wire.messages import AttemptKey, Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def mounting():
    """Return a function that makes a command prefix. The prefix changes mounts in a new mount namespace, and then runs the
    command.
    """

    def make(script):
        prefix = ("unshare", "--mount", "bash", "-ec", f'{script}; exec "$@"', "-")
        probe = ("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
        if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
            pytest.skip("tests cannot mount anything here")
        return prefix

    return make


@pytest.fixture
def storage(site, tmp_path):
    """The site's shared storage, below a folder that the keeper receives as its mount."""
    site.mount = tmp_path / "mnt"
    site.mount.mkdir()

    def start(*, prefix=(), mount=None, wait_s=1.0, **settings):
        workspace = f"{mount or site.mount}/{EXPERIMENT}"
        return site.start_keeper(
            options={"prefix": prefix},
            mount=str(mount or site.mount),
            mount_wait_s=wait_s,
            workspace=workspace,
            **settings,
        )

    site.start_on_mount = start
    return site


def mount_here(site):
    """Move the workspace into the mount folder, as if its storage were mounted there."""
    site.workspace.root.rename(site.mount / EXPERIMENT)


def one_line(keeper):
    """Check that the keeper's error is one line with one remedy; return it."""
    assert keeper.stderr.count("\n") == 1, keeper.stderr
    assert keeper.stderr.startswith("trial-keeper: cannot ")
    assert keeper.stderr.count("; ") == 1
    return keeper.stderr


# ---- the mount


def test_the_error_for_a_missing_mount_path_names_the_part_of_the_path_that_exists(storage):
    keeper = storage.start_on_mount(mount=storage.mount / "no" / "data")
    assert keeper.wait() == 105
    assert f"the path exists only up to {storage.mount}); mount" in one_line(keeper)


def test_an_empty_mount_folder_ends_the_keeper_with_code_101(storage):
    keeper = storage.start_on_mount()
    assert keeper.wait() == 101
    assert re.search(r"/mnt is empty; mount .* nniManagerNFSMountPath", one_line(keeper))


def test_the_error_for_a_mount_that_contains_only_other_experiments_lists_their_ids(storage):
    for number in range(7):
        (storage.mount / f"EXPT{number}").mkdir()
    keeper = storage.start_on_mount()
    assert keeper.wait() == 101
    assert "contains only EXPT0, EXPT1, EXPT2, EXPT3, EXPT4, ...; unless" in one_line(keeper)


def test_the_error_of_a_workspace_without_manager_json_recommends_nnictl_resume(storage):
    (storage.mount / EXPERIMENT).mkdir()
    keeper = storage.start_on_mount()
    assert keeper.wait() == 101
    assert "manager.json; run `nnictl resume` so that the manager writes it" in one_line(keeper)


def test_the_keeper_uses_a_mount_that_appears_while_it_waits(storage):
    storage.add_trial("echo ran")
    keeper = storage.start_on_mount(wait_s=60.0)
    said = wait_until(
        lambda: re.search(r"waiting up to (\d+) s more for the shared storage: (.*)", keeper.stderr),
        "the keeper logs what it waits for",
    )
    assert 50 <= int(said[1]) <= 55
    assert "is empty" in said[2]
    # mount_here() moves the workspace to the mount. The attributes of `storage` still contain the old path, so the test checks
    # only messages to the manager.
    mount_here(storage)
    assert keeper.wait() == 0
    ended = storage.manager.wait_for_message(TrialEnded)
    assert ended.reason is ExitReason.SUCCEEDED


def test_the_keeper_uses_a_bind_mount_that_appears_while_it_waits(storage, mounting):
    storage.add_trial("echo ran")
    # The script starts a background process that waits for the gate and then makes the mount. The test opens the gate as soon as
    # the keeper waits for the mount.
    gate = storage.gate("gate")
    late = (
        f"{{ read -r < {gate} || true; mount --bind {storage.workspace.root.parent} {storage.mount}; }} & :"
    )
    keeper = storage.start_on_mount(prefix=mounting(late), wait_s=60.0)
    wait_until(lambda: "more for the shared storage" in keeper.stderr, "the keeper waits")
    storage.open_gate("gate")
    assert keeper.wait() == 0
    assert storage.file(Stream.STDOUT) == b"ran\n"


# This FUSE server responds to no request and exits after 20 s. Until then, any access to its mount hangs in the kernel.
SILENT_SERVER = """
import ctypes, os, signal, sys
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
if ctypes.CDLL(None).mount(b"silent", os.fsencode(sys.argv[1]), b"fuse", 0, options):
    sys.exit("cannot mount")
os.close(1)
signal.alarm(20)
signal.pause()
"""


def test_the_keeper_ends_after_the_timeout_if_the_storage_does_not_respond(storage, mounting):
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    (storage.code / "server.py").write_text(SILENT_SERVER)
    # The server closes its stdout after it has made the mount. `read` waits for this, so the keeper starts after the mount.
    serve = f"exec 3< <({sys.executable} {storage.code}/server.py {storage.mount}); read -r <&3 || true"
    began_at_s = time.monotonic()
    keeper = storage.start_on_mount(prefix=mounting(serve))
    assert keeper.wait() == 106
    assert time.monotonic() - began_at_s < scaled_s(15)
    assert "the shared storage does not respond; check its server" in one_line(keeper)


def test_a_signal_ends_a_keeper_that_waits_for_its_mount(storage):
    keeper = storage.start_on_mount(wait_s=60.0)
    wait_until(lambda: "more for the shared storage" in keeper.stderr, "the keeper waits")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 128 + signal.SIGTERM


# ---- permissions and space


def test_read_only_storage_ends_the_keeper_with_code_111(storage, mounting):
    storage.add_trial("touch ran")
    mount_here(storage)
    script = f"mount --bind {storage.mount} {storage.mount}; mount -o remount,bind,ro {storage.mount}"
    keeper = storage.start_on_mount(prefix=mounting(script))
    assert keeper.wait() == 111
    assert one_line(keeper).endswith("Read-only file system; mount it read-write\n")
    assert not (storage.code / "ran").exists()


def test_full_storage_ends_the_keeper_with_code_112(storage, mounting):
    storage.add_trial("touch ran")
    fill = f"cat /dev/zero > {storage.mount}/filler 2> {os.devnull} || true"
    script = f"mount -t tmpfs -o size=256k small {storage.mount}; cp -r {storage.workspace.root} {storage.mount}; {fill}"
    keeper = storage.start_on_mount(prefix=mounting(script))
    assert keeper.wait() == 112
    assert one_line(keeper).endswith("No space left on device; free some space there\n")
    assert not (storage.code / "ran").exists()


def test_the_keeper_ends_with_code_112_if_the_storage_has_no_space_for_the_unpacked_code(storage, mounting):
    with_snapshot(storage, "touch ran", {"train.bin": os.urandom(200_000).hex()})
    script = (
        f"mount -t tmpfs -o size=600k small {storage.mount}; cp -r {storage.workspace.root} {storage.mount}"
    )
    keeper = storage.start_on_mount(prefix=mounting(script))
    assert keeper.wait() == 112
    assert "No space left on device; free some space there" in one_line(keeper)


@pytest.mark.any_machine
def test_unreadable_storage_is_reported_with_its_owner_and_mode(storage, open_way, as_nobody):
    storage.add_trial("touch ran")
    mount_here(storage)
    storage.mount.chmod(0o700)
    keeper = storage.start_on_mount(prefix=as_nobody)
    assert keeper.wait() == 106
    line = one_line(keeper)
    assert "Permission denied; let user 65534 of this container read the path" in line
    assert f"run the container as user 0, who owns {storage.mount} (drwx------)" in line


@pytest.mark.any_machine
def test_unwritable_storage_is_reported_with_its_owner_and_mode(storage, open_way, as_nobody):
    storage.add_trial("touch ran")
    mount_here(storage)
    attempts = storage.mount / EXPERIMENT / "trials" / TRIAL / "attempts"
    attempts.mkdir(mode=0o755)
    keeper = storage.start_on_mount(prefix=as_nobody)
    assert keeper.wait() == 113
    line = one_line(keeper)
    assert (
        f"cannot write to the workspace {attempts}: Permission denied for user 65534 of this container; "
        in line
    )
    assert f"run the container as user 0, who owns {attempts} (drwxr-xr-x), or in group 0" in line
    assert list(attempts.iterdir()) == []


# This keeper is root in its user namespace but nobody for the file system, like root on an NFS export with root squashing.
AS_SQUASHED_ROOT = """
import ctypes, os, sys
import trial_keeper.host.mount, trial_keeper.host.orphan_reaper
from trial_keeper.__main__ import main
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
libc = ctypes.CDLL(None)
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its files in /proc are its own again
if libc.unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit(99)
with open("/proc/self/uid_map", "w") as uid_map:
    uid_map.write("0 65534 1")
sys.exit(main([]))
"""


@pytest.mark.any_machine
@as_root
def test_the_error_for_root_without_write_permission_recommends_the_no_root_squash_option(storage, open_way):
    storage.add_trial("touch ran")
    mount_here(storage)
    attempts = storage.mount / EXPERIMENT / "trials" / TRIAL / "attempts"
    attempts.mkdir(mode=0o755)
    keeper = storage.start_on_mount(prefix=(sys.executable, "-c", AS_SQUASHED_ROOT))
    if keeper.wait() == 99:
        pytest.skip("user namespaces cannot be created here")
    assert keeper.wait() == 113
    line = one_line(keeper)
    assert (
        "Permission denied for user 0 of this container; export the storage with no_root_squash, run the container as"
        in line
    )


@pytest.mark.any_machine
def test_a_keeper_of_another_user_with_write_access_runs_the_trial(storage, open_way, as_nobody):
    with_snapshot(storage, "id -u; cat train.py", {"train.py": "print(1)"})
    mount_here(storage)
    attempts = storage.mount / EXPERIMENT / "trials" / TRIAL / "attempts"
    attempts.mkdir()
    attempts.chmod(0o777)
    keeper = storage.start_on_mount(prefix=as_nobody, collect_logs=True)
    assert keeper.wait() == 0, keeper.stderr
    assert storage.manager.stored(Stream.STDOUT) == b"65534\nprint(1)"


# ---- the code


def with_snapshot(site, command, files):
    """Add a trial whose code comes from a snapshot; return the path of the snapshot."""
    code = site.workspace.root.parent / "packed"
    code.mkdir()
    for name, content in files.items():
        (code / name).write_text(content)
    site.add_trial(command, code_dir="", code_snapshot=take_snapshot(code, site.workspace).name)
    return site.workspace.file(take_snapshot(code, site.workspace).name)


def test_each_attempt_runs_in_its_own_fresh_copy_of_the_code(site):
    with_snapshot(site, "pwd; echo $NNI_CODE_DIR; ls; touch left-over", {"train.py": "print(1)"})
    for attempt in (0, 1):
        assert site.start_keeper().wait() == 0
        key = AttemptKey(TRIAL, attempt_id(attempt), "main-0")
        code = site.attempt(key).path / "code"
        assert site.file(Stream.STDOUT, key).decode().splitlines() == [str(code), str(code), "train.py"]
        assert sorted(path.name for path in code.iterdir()) == ["left-over", "train.py"]


def ended_of(site):
    return site.exit(KEY)


def test_a_damaged_snapshot_ends_the_keeper_with_code_114_before_the_command_of_the_trial_runs(site):
    snapshot = with_snapshot(site, "touch ran", {"train.py": "print(1)"})
    snapshot.write_bytes(snapshot.read_bytes()[:-10])
    keeper = site.start_keeper()
    assert keeper.wait() == 114
    assert f"cannot unpack {snapshot}: " in one_line(keeper)
    ended = ended_of(site)
    assert (ended.reason, ended.exit_code) == (ExitReason.MOUNT, 114)
    assert f"trial-keeper: {ended.message}\n" == keeper.stderr


def test_a_missing_snapshot_ends_the_attempt_with_reason_mount(site):
    with_snapshot(site, "touch ran", {"train.py": "1"}).unlink()
    keeper = site.start_keeper()
    assert keeper.wait() == 101
    assert ended_of(site).reason is ExitReason.MOUNT


def test_a_snapshot_name_with_a_path_outside_the_workspace_is_refused(site):
    site.add_trial("touch ran", code_dir="", code_snapshot="../code.tar.gz")
    keeper = site.start_keeper()
    assert keeper.wait() == 114
    assert "cannot use '../code.tar.gz' as the name" in one_line(keeper)


def test_a_signal_during_the_unpacking_of_the_code_ends_the_attempt_with_reason_job_lost(site):
    # The archive is followed by 64 GiB of compressed zeros. The keeper decompresses them to verify the archive, which takes a
    # minute, so the signal arrives before the end.
    snapshot = with_snapshot(site, "touch ran", {"train.py": "1"})
    with snapshot.open("ab") as file:
        file.write(gzip.compress(bytes(64 << 20)) * 1024)
    keeper = site.start_keeper()
    wait_until(lambda: list(site.workspace.trials.glob("*/attempts/*/*/code/train.py")), "the keeper unpacks")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 128 + signal.SIGTERM
    ended = ended_of(site)
    assert (ended.reason, ended.exit_code) == (ExitReason.JOB_LOST, 143)
    assert ended.message == "stopped before the command started"


def packed(tmp_path, *members):
    """Make an archive that the manager would never create."""
    path = tmp_path / "code-bad.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, 1 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"x") if member.size else None)
    return path


FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize("has_filter", [True, False], ids=["filter", "no-filter"])
@pytest.mark.parametrize(
    "members",
    [
        [("../out", FILE, "")],
        [("/tmp/out", FILE, "")],
        [("a/../../out", FILE, "")],
        [("link", LINK, "..")],
        [("link", LINK, "/tmp")],
        [("sub/link", LINK, "../../out")],
        [("link", LINK, "sub"), ("link/out", FILE, "")],
        [("hard", HARD, "../out")],
        [("device", tarfile.CHRTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
    ],
)
def test_archive_members_that_lead_out_of_the_folder_are_refused(tmp_path, monkeypatch, members, has_filter):
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive = packed(tmp_path, *members)
    with pytest.raises(CodeDamaged, match="cannot unpack"):
        unpack_code(archive, tmp_path / "code")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", archive.name]


def test_a_python_without_tarfile_filters_can_unpack_files_and_links(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive = packed(
        tmp_path, ("sub", tarfile.DIRTYPE, ""), ("sub/file", FILE, ""), ("link", LINK, "sub/file")
    )
    unpack_code(archive, tmp_path / "code")
    assert (tmp_path / "code" / "link").read_text() == "x"


def test_every_truncation_or_flipped_byte_of_a_snapshot_is_detected(tmp_path):
    code, workspace = tmp_path / "code", tmp_path / "EXPT"
    code.mkdir()
    workspace.mkdir()
    (code / "train.py").write_text("print(1)\n" * 50)
    (code / "link").symlink_to("train.py")
    whole = (workspace / take_snapshot(code, Workspace(workspace)).name).read_bytes()
    broken = tmp_path / "broken.tar.gz"
    damages = [whole[:length] for length in range(len(whole))]
    # Bytes 4 to 9 of a gzip file are its time and operating system, which the keeper does not check.
    damages += [
        whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        for place in (*range(4), *range(10, len(whole)))
    ]
    for number, content in enumerate(damages):
        broken.write_bytes(content)
        with pytest.raises(CodeDamaged, match=r"cannot unpack \S+/broken\.tar\.gz: .+; remove it"):
            unpack_code(broken, tmp_path / str(number))
