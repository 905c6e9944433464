"""The state of the host that the keeper records."""

import tempfile

from trial_keeper.host.host_monitor import HostMonitor


def test_the_list_of_temporary_files_is_empty_if_the_host_has_no_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "absent")])
    assert HostMonitor(None, is_reused=True).baseline().in_tmp == frozenset()
