"""Where this machine has an NFS export, read from its table of mounts."""

import re
from pathlib import Path

import pytest

from nni_manager.errors import UserError
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
def test_an_export_is_found_where_it_or_what_holds_it_is_mounted(server, path, folder):
    assert export_in(TABLE, server, path) == (None if folder is None else Path(folder))


def test_of_two_mounts_the_later_hides_the_earlier():
    assert export_in(TABLE + TABLE.replace("/mnt/nni", "/new"), "10.0.0.1", "/var/nfs") == Path("/new")


def test_an_export_that_is_mounted_nowhere_is_named_with_what_to_do():
    told = "cannot find a mount of nas.example:/nni on this machine"
    with pytest.raises(UserError, match=rf"{re.escape(told)}.*sudo mount -t nfs nas.example:/nni /mnt/nni"):
        folder_of_export("nas.example", "/nni")
