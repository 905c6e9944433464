"""What the keeper remembers of its host."""

import tempfile

from trial_keeper.host.host_monitor import HostMonitor


def test_a_host_without_a_temporary_folder_has_no_entries_in_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "absent")])
    assert HostMonitor(None, is_reused=True).baseline().in_tmp == frozenset()
