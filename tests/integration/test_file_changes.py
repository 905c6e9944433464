"""Trials that truncate, rewrite or replace their own files."""

import pytest
from fake_manager import KEY

from trial_keeper.wire.file_changes import FileChange, file_warning
from trial_keeper.wire.messages import Stream, TrialEnded

# The trial writes six reports, waits until the keeper has collected them, changes its file, and writes five more reports.
TRAIN = """
import os
import nni_sdk as nni
nni.get_next_parameter()
metrics = os.environ["NNI_SYS_DIR"] + "/.nni/metrics"
stdout = os.environ["NNI_OUTPUT_DIR"] + "/stdout"
print("a line of output", flush=True)
for i in range(6):
    nni.report_intermediate_result(i)
open("collected").read()
{change}
for i in range(5):
    nni.report_intermediate_result(i)
"""
CHANGES = {
    "nothing": ("", {}),
    "truncated": ("os.truncate(metrics, 0)", {Stream.METRICS: FileChange.TRUNCATED}),
    "rewritten": (
        "size = os.path.getsize(metrics)\nwith open(metrics, 'r+b') as file: file.write(b'x' * size)",
        {Stream.METRICS: FileChange.REWRITTEN},
    ),
    "removed": ("os.unlink(metrics)", {Stream.METRICS: FileChange.REPLACED}),
    "replaced": (
        "os.rename(metrics, metrics + '.old')\nwith open(metrics, 'wb') as file: file.write(b'of another run')",
        {Stream.METRICS: FileChange.REPLACED},
    ),
    "two files": (
        "os.truncate(metrics, 0)\nos.truncate(stdout, 0)",
        {Stream.METRICS: FileChange.TRUNCATED, Stream.STDOUT: FileChange.TRUNCATED},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_end_report_of_a_trial_lists_each_change_of_its_metrics_file_or_output_file(site, name):
    change, found = CHANGES[name]
    site.gate("collected")
    site.add_python_trial(TRAIN.format(change=change))
    keeper = site.start_keeper(collect_logs=True)
    site.manager.wait_for(lambda: len(site.manager.store.records.get(KEY, ())) == 6, "six records are stored")
    site.manager.wait_for_bytes(b"a line of output", Stream.STDOUT)
    site.open_gate("collected")
    assert keeper.wait() == 0
    ended = site.manager.all_of(TrialEnded)[-1]
    assert set(ended.warnings) == {file_warning(stream, kind) for stream, kind in found.items()}
    assert site.exit(KEY) == ended
    for warning in ended.warnings:
        assert keeper.stderr.count(warning) == 1


def test_a_truncated_file_is_reported_even_if_it_grows_again_before_the_next_poll(site):
    """The kind of the reported change depends on whether the keeper polls before the file grows."""
    site.gate("collected")
    longer = "os.truncate(metrics, 0)\nfor i in range(100, 200): nni.report_intermediate_result(i)"
    site.add_python_trial(TRAIN.format(change=longer))
    keeper = site.start_keeper()
    site.manager.wait_for(lambda: len(site.manager.store.records.get(KEY, ())) == 6, "six records are stored")
    site.open_gate("collected")
    assert keeper.wait() == 0
    (warning,) = site.manager.all_of(TrialEnded)[-1].warnings
    changes = (FileChange.TRUNCATED, FileChange.REWRITTEN)
    assert warning in [file_warning(Stream.METRICS, change) for change in changes]
