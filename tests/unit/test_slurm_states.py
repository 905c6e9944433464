"""Job states and errors, parsed from the output of Slurm's commands. The sample output has the format of Slurm 22.05."""

from dataclasses import replace

import pytest

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded
from nni_manager.training_services.slurm import states
from trial_keeper.wire.reasons import ExitReason


def row(state, exit_code="0", reason="None", nodes="n1", preempted="N/A", left="UNLIMITED"):
    (found,) = states.parse_squeue(
        f"12|nni-EXPT-trial1|{state}|{exit_code}|{preempted}|{left}|{nodes}|{reason}|\n", "nni-EXPT-"
    )
    return found


def end(*columns, log="", was_stopped=False, **others):
    return states.end_of(row(*columns, **others), log, was_stopped=was_stopped)


def test_a_row_of_squeue_contains_the_state_and_the_exit_status_and_the_reason():
    found = row("FAILED", "26880", "NonZeroExitCode")
    assert (found.slurm_id, found.name, found.state) == ("12", "nni-EXPT-trial1", "FAILED")
    assert found.exit_status == 105 << 8
    assert found.has_ended


def test_a_pending_reason_may_contain_the_column_separator():
    assert row("PENDING", reason="held by admin | ask ada").pending_reason == "held by admin | ask ada"


def test_squeue_output_that_is_not_a_table_row_raises_an_error():
    with pytest.raises(ValueError, match="slurm_load_jobs"):
        states.parse_squeue("slurm_load_jobs error", "nni-EXPT-")


def test_squeue_rows_of_other_jobs_are_ignored_even_if_their_names_contain_line_ends():
    others = "9|a|b|RUNNING|0|N/A|1:00|n1|None|\n10_[1-5]|array|PENDING|0|N/A|1:00||Resources|\n11|two\nlines|RUNNING|0|N/A|\n"
    ours = "12|nni-EXPT-trial1|RUNNING|0|N/A|1:00|n1|None|\n"
    (found,) = states.parse_squeue(others + ours, "nni-EXPT-")
    assert (found.slurm_id, found.state, found.time_left_s) == ("12", "RUNNING", 60)
    assert states.parse_squeue(others, "nni-EXPT-") == states.parse_squeue("", "nni-EXPT-") == []


@pytest.mark.parametrize(
    "state",
    [
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "CONFIGURING",
        "SUSPENDED",
        "STAGE_OUT",
        "REQUEUED",
        "A_STATE_OF_LATER",
    ],
)
def test_a_job_has_not_ended_if_its_state_is_unknown_or_not_terminal(state):
    assert not row(state).has_ended


def test_only_a_pending_job_has_a_pending_reason():
    assert (
        row("PENDING", reason="QOSMaxSubmitJobPerUserLimit").pending_reason == "QOSMaxSubmitJobPerUserLimit"
    )
    assert row("PENDING").pending_reason == ""
    assert row("RUNNING", reason="Resources").pending_reason == ""


def test_a_running_job_has_a_warning_if_slurm_preempts_or_suspends_it():
    assert row("RUNNING").warning == ""
    assert row("RUNNING", preempted="2026-11-27T22:20:17").is_preempted
    assert "preempts job 12" in row("RUNNING", preempted="2026-11-27T22:20:17").warning
    assert not row("PREEMPTED", preempted="2026-11-27T22:20:17").is_preempted
    assert row("SUSPENDED").warning == "Slurm has suspended job 12"


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("TIMEOUT", ExitReason.JOB_LOST, "TIMEOUT on n1: it reached its time limit; raise timeLimit"),
        ("OUT_OF_MEMORY", ExitReason.OUT_OF_MEMORY, "it used more than its memory; raise memory"),
        ("NODE_FAIL", ExitReason.JOB_LOST, "NODE_FAIL on n1"),
        ("BOOT_FAIL", ExitReason.JOB_LOST, "BOOT_FAIL on n1"),
        ("PREEMPTED", ExitReason.PREEMPTED, "preempted by a job of higher priority"),
        ("CANCELLED", ExitReason.JOB_LOST, "CANCELLED, but not by this manager"),
        ("CANCELLED by 1000", ExitReason.JOB_LOST, "CANCELLED by 1000, but not by this manager"),
    ],
)
def test_the_end_of_a_job_that_slurm_ended_has_a_message_with_the_state_and_no_exit_code(
    state, reason, words
):
    ended = end(state, "15")
    assert (ended.exit_code, ended.reason, ended.is_explained) == (None, reason, True)
    assert ended.message.startswith("Slurm reports job 12 (nni-EXPT-trial1): ")
    assert words in ended.message


def test_the_end_of_a_job_that_failed_by_itself_has_the_exit_code_and_the_last_output():
    ended = end("FAILED", "26880", "NonZeroExitCode", log="trial-keeper: cannot find the mount")
    assert (ended.exit_code, ended.reason) == (105, ExitReason.KEEPER_LOST)
    assert ended.message == (
        "Slurm reports job 12 (nni-EXPT-trial1): FAILED, exit code 105 on n1\ntrial-keeper: cannot find the mount"
    )
    assert end("COMPLETED").message == ""
    assert end("COMPLETED").exit_code == 0


def test_the_exit_code_of_a_job_killed_by_a_signal_is_128_plus_the_signal_number():
    ended = end("FAILED", "9", "JobLaunchFailure")
    assert ended.exit_code == 137
    assert "FAILED, signal 9" in ended.message


def test_the_error_suggests_a_shared_folder_if_a_node_cannot_open_the_output_file():
    ended = end("FAILED", "4021", "JobLaunchFailure")
    assert (ended.exit_code, ended.reason) == (None, ExitReason.COULD_NOT_START)
    assert "set experimentWorkingDirectory to a folder that the compute nodes share" in ended.message


def test_the_message_mentions_the_time_limit_if_a_job_ended_just_before_the_limit():
    assert ", 12 s before its time limit; raise timeLimit" in end("FAILED", "36608", left="0:12").message
    assert "12 s before its time limit" in end("COMPLETED", left="0:12").message
    assert "time limit" not in end("FAILED", "256", left="1:00:00").message


@pytest.mark.parametrize(("state", "code"), [("CANCELLED", None), ("FAILED", 9), ("COMPLETED", 0)])
def test_the_message_mentions_the_stop_request_if_a_job_was_stopped_on_request(state, code):
    ended = end(state, "2304" if state == "FAILED" else "0", was_stopped=True)
    assert (ended.exit_code, ended.message) == (code, "Slurm has ended job 12 (nni-EXPT-trial1) on request")


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
def test_a_job_counts_as_preempted_if_it_exits_during_the_grace_time_of_a_preemption(state):
    ended = end(state, "36608", preempted="2026-11-27T22:20:17")
    assert (ended.exit_code, ended.reason) == (None, ExitReason.PREEMPTED)
    assert "in the grace time after it was preempted" in ended.message


def test_a_preempted_job_has_the_reason_preempted_even_if_a_stop_was_requested():
    assert end("PREEMPTED", was_stopped=True).reason is ExitReason.PREEMPTED


def test_a_sacct_row_contains_the_id_of_the_user_who_cancelled_the_job():
    (found,) = states.parse_sacct("12|nni-EXPT-trial1|CANCELLED by 1000|0:15|n1\n")
    assert found.has_ended
    assert found.exit_status == 15
    assert "CANCELLED by 1000" in states.end_of(found, "", was_stopped=False).message


# ---- errors

FAILED = "sbatch: error: Batch job submission failed: "
LIMIT = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("printed", "kind", "words"),
    [
        (FAILED + LIMIT, QuotaExceeded, "it is submitted again when other jobs have ended"),
        (
            FAILED + "Unable to contact slurm controller (connect failure)",
            ClusterUnavailable,
            "check slurmctld with `scontrol ping`",
        ),
        (FAILED + "Socket timed out on send/recv operation", ClusterUnavailable, "scontrol ping"),
        (FAILED + "Protocol authentication error", ClusterUnavailable, "munged"),
        ("sbatch: error: Munge encode failed: Failed to access socket", ClusterUnavailable, "munged"),
        (FAILED + "Invalid partition name specified", UserError, "correct partition in the experiment file"),
        (
            FAILED + "Invalid account or account/partition combination specified",
            UserError,
            "sacctmgr show associations",
        ),
        (FAILED + "Invalid qos specification", UserError, "correct qos"),
        (
            FAILED + "Requested time limit is invalid (missing or exceeds some limit)",
            UserError,
            "correct timeLimit",
        ),
        (FAILED + "Invalid generic resource (gres) specification", UserError, "correct gres or gpus"),
        (FAILED + "Invalid feature specification", UserError, "correct constraint"),
        (
            "sbatch: error: Memory specification can not be satisfied\n"
            + FAILED
            + "Requested node configuration is not available",
            UserError,
            "correct memory",
        ),
        (FAILED + "Requested node configuration is not available", UserError, "sinfo"),
        (
            FAILED + "I/O error writing script/environment to file",
            UserError,
            "correct the options in trainingService",
        ),
        ("", UserError, "it printed nothing"),
    ],
)
def test_an_error_contains_the_output_of_the_slurm_command_and_a_remedy(printed, kind, words):
    error = states.error_of("sbatch", printed)
    assert type(error) is kind
    assert str(error).startswith("cannot ")
    assert words in str(error)
    assert printed.rpartition(": ")[2] in str(error)


def test_an_error_about_the_limit_of_submitted_jobs_is_retryable():
    assert isinstance(states.error_of("sbatch", FAILED + LIMIT), RetryableError)


def test_jobs_that_could_not_be_signalled_are_parsed_from_the_output_of_scancel():
    printed = (
        "scancel: error: Kill job error on job id 5: Invalid job id specified\n"
        "scancel: error: Kill job error on job id 17: Job/step already completing or completed\n"
        "scancel: error: Kill job error on job id 18_3: Invalid job id specified\n"
    )
    assert states.unsignalled(printed) == {"5", "17", "18_3"}


@pytest.mark.parametrize(
    ("slurm_id", "number", "task"),
    [("12", 12, None), ("12_0", 12, 0), ("12_31", 12, 31), ("12_[4-7]", 12, None)],
)
def test_the_slurm_id_of_an_array_task_contains_the_number_of_the_task(slurm_id, number, task):
    found = replace(row("RUNNING"), slurm_id=slurm_id)
    assert (found.number, found.task) == (number, task)
