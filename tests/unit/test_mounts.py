"""The local mount of an NFS export, read from the table of mounts."""

import re
from pathlib import Path

import pytest

from nni_manager.errors import UserError
from nni_manager.training_services import mounts
from nni_manager.training_services.mounts import export_in, folder_of_export

TABLE = """\
21 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
36 21 0:50 / /mnt/nni rw,relatime shared:9 - nfs4 10.0.0.1:/var/nfs rw,vers=4.2
37 21 0:51 / /mnt/root rw,relatime - nfs4 nas:/ rw
38 21 0:52 /sub /mnt/a\\040b rw,relatime - nfs [fd00::1]:/data rw
39 21 0:53 / /mnt/fuse rw - fuse.sshfs 10.0.0.1:/other rw
"""


@pytest.mark.parametrize(
    ("server", "path", "folder"),
    [
        ("10.0.0.1", "/var/nfs", "/mnt/nni"),
        ("10.0.0.1", "/var/nfs/team/a", "/mnt/nni/team/a"),
        ("nas", "/x", "/mnt/root/x"),
        ("fd00::1", "/data/sub", "/mnt/a b"),
        ("10.0.0.1", "/var", None),
        ("10.0.0.1", "/var/nfs2", None),
        ("10.0.0.1", "/other", None),
        ("10.0.0.2", "/var/nfs", None),
    ],
)
def test_an_nfs_export_is_found_at_its_mount_or_below_the_mount_of_its_parent_folder(server, path, folder):
    assert export_in(TABLE, server, path) == (None if folder is None else Path(folder))


def test_a_later_mount_of_an_nfs_export_replaces_an_earlier_mount():
    assert export_in(TABLE + TABLE.replace("/mnt/nni", "/new"), "10.0.0.1", "/var/nfs") == Path("/new")


def test_the_error_for_an_export_without_a_mount_contains_the_mount_command():
    expected = "cannot find a mount of nas.example:/nni on this machine"
    with pytest.raises(
        UserError, match=rf"{re.escape(expected)}.*sudo mount -t nfs nas.example:/nni /mnt/nni"
    ):
        folder_of_export("nas.example", "/nni")


def test_the_error_for_a_missing_folder_below_a_mounted_export_contains_the_mkdir_command(
    tmp_path, monkeypatch
):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.replace("/mnt/nni", str(tmp_path)))
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    assert folder_of_export("10.0.0.1", "/var/nfs") == tmp_path
    (tmp_path / "team").mkdir()
    wanted = (
        f"cannot find the folder /var/nfs/team/a/b on NFS server 10.0.0.1: its export is mounted here, and {tmp_path}/team "
        f"has no a/b; create it with `mkdir -p {tmp_path}/team/a/b`, or correct the path"
    )
    with pytest.raises(UserError, match=re.escape(wanted)):
        folder_of_export("10.0.0.1", "/var/nfs/team/a/b")
