"""A keeper enters shared storage: missing, late, forbidden, read-only or full; and unpacks the code from it."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import psutil
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
    """A command that changes mounts as only its own processes see them."""

    def make(script):
        prefix = ("unshare", "--mount", "bash", "-ec", f'{script}; exec "$@"', "-")
        probe = ("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
        if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
            pytest.skip("this machine lets tests mount nothing")
        return prefix

    return make


@pytest.fixture
def storage(site, tmp_path):
    """The site's experiment on its shared storage, moved below a folder that a keeper takes for its mount."""
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
    """As the storage's own mount would."""
    site.workspace.root.rename(site.mount / EXPERIMENT)


def one_line(keeper):
    """The keeper's complaint: one line, one remedy."""
    assert keeper.stderr.count("\n") == 1, keeper.stderr
    assert keeper.stderr.startswith("trial-keeper: cannot ")
    assert keeper.stderr.count("; ") == 1
    return keeper.stderr


# ---- the mount


def test_a_path_that_is_missing_is_told_with_the_last_folder_that_is_there(storage):
    keeper = storage.start_on_mount(mount=storage.mount / "no" / "data")
    assert keeper.wait() == 105
    assert f"the path exists only up to {storage.mount}); mount" in one_line(keeper)


def test_a_folder_where_nothing_is_mounted(storage):
    keeper = storage.start_on_mount()
    assert keeper.wait() == 101
    assert re.search(r"/mnt is empty; mount .* nniManagerNFSMountPath", one_line(keeper))


def test_the_wrong_storage(storage):
    for number in range(7):
        (storage.mount / f"EXPT{number}").mkdir()
    keeper = storage.start_on_mount()
    assert keeper.wait() == 101
    assert "contains only EXPT0, EXPT1, EXPT2, EXPT3, EXPT4, ...; unless" in one_line(keeper)


def test_a_folder_of_the_experiment_that_no_manager_wrote(storage):
    (storage.mount / EXPERIMENT).mkdir()
    keeper = storage.start_on_mount()
    assert keeper.wait() == 101
    assert "manager.json; run `nnictl resume` so that the manager writes it" in one_line(keeper)


def test_a_mount_that_comes_while_the_keeper_waits_is_entered(storage):
    storage.add_trial("echo ran")
    keeper = storage.start_on_mount(wait_s=60.0)
    said = wait_until(
        lambda: re.search(r"waiting up to (\d+) s more for the shared storage: (.*)", keeper.stderr),
        "the keeper says what it waits for",
    )
    assert 50 <= int(said[1]) <= 55
    assert "is empty" in said[2]
    # The folder of the experiment moves, and so does what the test looks at.
    mount_here(storage)
    assert keeper.wait() == 0
    ended = storage.manager.wait_for_message(TrialEnded)
    assert ended.reason is ExitReason.SUCCEEDED


def test_a_real_mount_that_comes_late_is_entered(storage, mounting):
    storage.add_trial("echo ran")
    # The test lets it be mounted once the keeper waits.
    gate = storage.gate("gate")
    late = (
        f"{{ read -r < {gate} || true; mount --bind {storage.workspace.root.parent} {storage.mount}; }} & :"
    )
    keeper = storage.start_on_mount(prefix=mounting(late), wait_s=60.0)
    wait_until(lambda: "more for the shared storage" in keeper.stderr, "the keeper waits")
    storage.open_gate("gate")
    assert keeper.wait() == 0
    assert storage.file(Stream.STDOUT) == b"ran\n"


# Mounts a file system whose server never says a word, and holds it for a while: a look at it hangs in the kernel.
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


def test_storage_that_does_not_answer_is_given_up_in_time(storage, mounting):
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    (storage.code / "server.py").write_text(SILENT_SERVER)
    # The server closes its stdout once it has mounted.
    serve = f"exec 3< <({sys.executable} {storage.code}/server.py {storage.mount}); read -r <&3 || true"
    began_at_s = time.monotonic()
    keeper = storage.start_on_mount(prefix=mounting(serve))
    assert keeper.wait() == 106
    assert time.monotonic() - began_at_s < scaled_s(15)
    assert "the shared storage does not respond; check its server" in one_line(keeper)


def test_a_signal_ends_a_keeper_that_waits(storage):
    keeper = storage.start_on_mount(wait_s=60.0)
    wait_until(lambda: "more for the shared storage" in keeper.stderr, "the keeper waits")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 128 + signal.SIGTERM


# ---- what cannot be read or written


def test_storage_that_is_read_only(storage, mounting):
    storage.add_trial("touch ran")
    mount_here(storage)
    script = f"mount --bind {storage.mount} {storage.mount}; mount -o remount,bind,ro {storage.mount}"
    keeper = storage.start_on_mount(prefix=mounting(script))
    assert keeper.wait() == 111
    assert one_line(keeper).endswith("Read-only file system; mount it read-write\n")
    assert not (storage.code / "ran").exists()


def test_storage_that_is_full(storage, mounting):
    storage.add_trial("touch ran")
    fill = f"cat /dev/zero > {storage.mount}/filler 2> {os.devnull} || true"
    script = f"mount -t tmpfs -o size=256k small {storage.mount}; cp -r {storage.workspace.root} {storage.mount}; {fill}"
    keeper = storage.start_on_mount(prefix=mounting(script))
    assert keeper.wait() == 112
    assert one_line(keeper).endswith("No space left on device; free some space there\n")
    assert not (storage.code / "ran").exists()


def test_storage_with_no_room_for_the_code_fails_the_trial_with_that_reason(storage, mounting):
    with_snapshot(storage, "touch ran", {"train.bin": os.urandom(200_000).hex()})
    script = (
        f"mount -t tmpfs -o size=600k small {storage.mount}; cp -r {storage.workspace.root} {storage.mount}"
    )
    keeper = storage.start_on_mount(prefix=mounting(script))
    assert keeper.wait() == 112
    assert "No space left on device; free some space there" in one_line(keeper)


@pytest.mark.any_machine
def test_storage_that_another_user_may_not_read(storage, open_way, as_nobody):
    storage.add_trial("touch ran")
    mount_here(storage)
    storage.mount.chmod(0o700)
    keeper = storage.start_on_mount(prefix=as_nobody)
    assert keeper.wait() == 106
    line = one_line(keeper)
    assert "Permission denied; let user 65534 of this container read the path" in line
    assert f"run the container as user 0, who owns {storage.mount} (drwx------)" in line


@pytest.mark.any_machine
def test_storage_where_another_user_may_not_write_as_when_root_is_squashed(storage, open_way, as_nobody):
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


# A keeper that is root among its own and nobody to the file system, as behind a server that squashes root.
AS_SQUASHED_ROOT = """
import ctypes, os, sys
import trial_keeper.host.mount
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
def test_root_that_the_storage_takes_for_another_user_is_told_of_squashing(storage, open_way):
    storage.add_trial("touch ran")
    mount_here(storage)
    attempts = storage.mount / EXPERIMENT / "trials" / TRIAL / "attempts"
    attempts.mkdir(mode=0o755)
    keeper = storage.start_on_mount(prefix=(sys.executable, "-c", AS_SQUASHED_ROOT))
    if keeper.wait() == 99:
        pytest.skip("this machine lets users make no user namespaces")
    assert keeper.wait() == 113
    line = one_line(keeper)
    assert (
        "Permission denied for user 0 of this container; export the storage with no_root_squash, run the container as"
        in line
    )


@pytest.mark.any_machine
def test_another_user_who_may_write_runs_the_trial(storage, open_way, as_nobody):
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
    """A trial whose code comes from a snapshot."""
    code = site.workspace.root.parent / "packed"
    code.mkdir()
    for name, content in files.items():
        (code / name).write_text(content)
    site.add_trial(command, code_dir="", code_snapshot=take_snapshot(code, site.workspace).name)
    return site.workspace.file(take_snapshot(code, site.workspace).name)


def test_each_attempt_runs_in_a_fresh_copy_of_its_own(site):
    with_snapshot(site, "pwd; echo $NNI_CODE_DIR; ls; touch left-over", {"train.py": "print(1)"})
    for attempt in (0, 1):
        assert site.start_keeper().wait() == 0
        key = AttemptKey(TRIAL, attempt_id(attempt), "main-0")
        code = site.attempt(key).path / "code"
        assert site.file(Stream.STDOUT, key).decode().splitlines() == [str(code), str(code), "train.py"]
        assert sorted(path.name for path in code.iterdir()) == ["left-over", "train.py"]


def ended_of(site):
    return site.exit(KEY)


def test_a_snapshot_that_is_damaged_is_told_to_the_manager_and_runs_nothing(site):
    snapshot = with_snapshot(site, "touch ran", {"train.py": "print(1)"})
    snapshot.write_bytes(snapshot.read_bytes()[:-10])
    keeper = site.start_keeper()
    assert keeper.wait() == 114
    assert f"cannot unpack {snapshot}: " in one_line(keeper)
    ended = ended_of(site)
    assert (ended.reason, ended.exit_code) == (ExitReason.MOUNT, 114)
    assert f"trial-keeper: {ended.message}\n" == keeper.stderr


def test_a_snapshot_that_is_not_there_is_the_storages_fault(site):
    with_snapshot(site, "touch ran", {"train.py": "1"}).unlink()
    keeper = site.start_keeper()
    assert keeper.wait() == 101
    assert ended_of(site).reason is ExitReason.MOUNT


def test_a_snapshot_whose_name_leads_out_of_the_workspace_is_not_opened(site):
    site.add_trial("touch ran", code_dir="", code_snapshot="../code.tar.gz")
    keeper = site.start_keeper()
    assert keeper.wait() == 114
    assert "cannot use '../code.tar.gz' as the name" in one_line(keeper)


def test_a_signal_while_the_code_is_unpacked_ends_the_attempt_as_lost(site):
    # A pipe in place of the snapshot: the keeper waits in the middle of it.
    snapshot = with_snapshot(site, "touch ran", {"train.py": "1"})
    snapshot.unlink()
    os.mkfifo(snapshot)
    keeper = site.start_keeper()
    with snapshot.open("wb"):
        # A signal between Python's last look for one and the read itself would be met after the read, which has no end here.
        wait_until(lambda: psutil.Process(keeper.pid).status() == psutil.STATUS_SLEEPING, "it reads")
        keeper.signal(signal.SIGTERM)
        assert keeper.wait() == 128 + signal.SIGTERM
    ended = ended_of(site)
    assert (ended.reason, ended.exit_code) == (ExitReason.JOB_LOST, 143)
    assert ended.message == "stopped before the command started"


def packed(tmp_path, *members):
    """An archive as no manager makes it."""
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
def test_no_member_lies_or_leads_outside_whatever_python_knows_of_it(
    tmp_path, monkeypatch, members, has_filter
):
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive = packed(tmp_path, *members)
    with pytest.raises(CodeDamaged, match="cannot unpack"):
        unpack_code(archive, tmp_path / "code")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", archive.name]


def test_a_python_without_the_filter_unpacks_the_same(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive = packed(
        tmp_path, ("sub", tarfile.DIRTYPE, ""), ("sub/file", FILE, ""), ("link", LINK, "sub/file")
    )
    unpack_code(archive, tmp_path / "code")
    assert (tmp_path / "code" / "link").read_text() == "x"


def test_every_damage_to_a_snapshot_is_noticed(tmp_path):
    code, workspace = tmp_path / "code", tmp_path / "EXPT"
    code.mkdir()
    workspace.mkdir()
    (code / "train.py").write_text("print(1)\n" * 50)
    (code / "link").symlink_to("train.py")
    whole = (workspace / take_snapshot(code, Workspace(workspace)).name).read_bytes()
    broken = tmp_path / "broken.tar.gz"
    damages = [whole[:length] for length in range(len(whole))]
    # Bytes 4 to 9 are the time and the maker, which nobody reads.
    damages += [
        whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        for place in (*range(4), *range(10, len(whole)))
    ]
    for number, content in enumerate(damages):
        broken.write_bytes(content)
        with pytest.raises(CodeDamaged, match=r"cannot unpack \S+/broken\.tar\.gz: .+; remove it"):
            unpack_code(broken, tmp_path / str(number))
