"""Trials with excessive output run in real experiments."""

import os

from amounts import amount
from deadlines import scaled_s
from real_experiment import assert_rows_are_what_was_written, values

from nni_manager.domain.trial_run import METRICS_ARE_CUT, NO_FINAL_RESULT_BEFORE_THE_CUT
from nni_sdk.records import decode
from trial_keeper.wire.messages import Stream

METRICS_BYTES, LOG_BYTES = 5000, 3000
# The keeper and the manager use these quotas instead of the real quotas, which are gigabytes.
SMALL_LIMITS = f"""
import sys
if "-m" in sys.orig_argv and {{"nni_manager", "trial_keeper"}} & set(sys.orig_argv):
    from trial_keeper.wire.limits import QUOTA_BYTES
    from trial_keeper.wire.messages import Stream
    QUOTA_BYTES.update({{Stream.METRICS: {METRICS_BYTES}, Stream.STDOUT: {LOG_BYTES}}})
"""
WORDY = """
import nni_sdk as nni
nni.get_next_parameter()
for number in range(500):
    print("this is line", number)
    nni.report_intermediate_result(number)
nni.report_final_result(1)
"""
REPORTS, WRITES = amount(20_000, 200_000), amount(10_000, 100_000)
# Real trials may write ten million reports and a hundred thousand tiny writes. This trial writes fewer, so that the test is
# short.
FLOOD = f"""
import os
import nni_sdk as nni
nni.get_next_parameter()
for number in range({REPORTS}):
    nni.report_intermediate_result(number)
for number in range({WRITES}):
    os.write(1, b"x")
nni.report_final_result(1)
"""


def test_a_trial_over_its_log_quota_succeeds_and_its_warning_says_where_the_complete_files_are(
    a_real_experiment, tmp_path
):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SMALL_LIMITS)
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    experiment = a_real_experiment(
        WORDY, trialConcurrency=1, maxTrialNum=1, logCollection="http", environ={"PYTHONPATH": paths}
    )
    experiment.start()
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["message"]) == ("SUCCEEDED", NO_FINAL_RESULT_BEFORE_THE_CUT)
    written = {stream: experiment.stream(trial["id"], stream) for stream in Stream}
    metrics_line, stdout_line = sorted(trial["warning"].splitlines())
    assert metrics_line.startswith(f"{METRICS_ARE_CUT} at {METRICS_BYTES} bytes")
    assert f"the complete file is {written[Stream.METRICS]};" in metrics_line
    assert stdout_line.startswith(f"its stdout is cut at {LOG_BYTES} bytes")

    (collected,) = experiment.folder.collected_logs.glob("*/*/*/stdout")
    beginning, end = collected.read_bytes()[:LOG_BYTES], collected.read_bytes()[LOG_BYTES:]
    assert beginning == written[Stream.STDOUT].read_bytes()[:LOG_BYTES]
    assert end == f"\n[trial-keeper] {stdout_line}\n".encode()
    whole = decode(written[Stream.METRICS].read_bytes()[:METRICS_BYTES], 0).records
    assert values(experiment.rows(trial["id"])) == [*range(len(whole))]


def test_a_flood_of_reports_and_short_output_lines_is_stored_completely(a_real_experiment):
    quiet = "import nni_sdk as nni\nif nni.get_next_parameter()['x'] >= 0 and nni.get_sequence_id() == 0:\n"
    quiet += "    nni.report_final_result(7)\nelse:\n" + "".join(
        f"    {line}\n" for line in FLOOD.replace("nni.get_next_parameter()\n", "").splitlines() if line
    )
    experiment = a_real_experiment(quiet, trialConcurrency=2, maxTrialNum=2, logCollection="http")
    experiment.start()
    summary = experiment.wait_for_status("DONE", timeout_s=scaled_s(180))
    assert summary["counts"]["SUCCEEDED"] == 2
    first, flood = sorted(experiment.get("/trials"), key=lambda trial: trial["sequenceId"])
    assert (first["value"], first["warning"], flood["warning"]) == (7, "", "")
    rows = assert_rows_are_what_was_written(experiment, flood["id"])
    assert values(rows) == [*range(REPORTS), 1]
    (collected,) = experiment.folder.collected_logs.glob(f"{flood['id']}/*/*/stdout")
    assert collected.read_bytes() == b"x" * WRITES
    # The manager reads the metrics page by page, and returns them as one document.
    assert len(experiment.get(f"/metric-data/{flood['id']}")) == REPORTS + 1
