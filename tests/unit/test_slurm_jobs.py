"""Which jobs Slurm lists, the files of job arrays, and which jobs are submitted together."""

import asyncio

import pytest

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.slurm.jobs import Job, JobArray, JobFiles, ListedJobs
from nni_manager.training_services.slurm.states import JobRow
from nni_manager.training_services.slurm.submissions import Submissions

ARRAY = JobArray("nni-EXPT-array-1", ("a", "b", "c"))


def row(slurm_id, name=ARRAY.name, state="RUNNING"):
    return JobRow(slurm_id, name, state, 0, "", None, "", "")


def listed(*rows):
    return ListedJobs(rows, "nni-EXPT-", {ARRAY.name: ARRAY})


def test_array_tasks_are_found_by_their_array_and_single_jobs_by_their_names():
    found = listed(row("7_2"), row("8", "nni-EXPT-d"), row("7_0"))
    assert {job_id: found.row(job_id) and found.row(job_id).slurm_id for job_id in "abcde"} == {
        "a": "7_0", "b": None, "c": "7_2", "d": "8", "e": None
    }  # fmt: skip
    assert found.task_id(ARRAY, "b") == "7_1"


def test_the_newest_slurm_job_counts_if_slurm_lists_several_for_one_job_id():
    assert listed(row("10", "nni-EXPT-a"), row("9_0")).row("a").slurm_id == "10"
    assert listed(row("9", "nni-EXPT-a"), row("10_0")).row("a").slurm_id == "10_0"


def test_a_running_slurm_job_takes_precedence_over_a_later_ended_one_for_the_same_job_id():
    assert listed(row("9_0"), row("10", "nni-EXPT-a", "FAILED")).row("a").slurm_id == "9_0"
    assert listed(row("9_0", state="FAILED"), row("10_0", state="FAILED")).row("a").slurm_id == "10_0"


def test_the_row_of_a_whole_array_is_no_job_but_shows_that_the_array_exists():
    found = listed(row("7"), row("7_3"))
    assert [found.row(job_id) for job_id in "abc"] == [None, None, None]
    assert found.task_id(ARRAY, "b") == "7_1"
    assert listed().task_id(ARRAY, "b") is None
    assert listed(row("7")).task_id(None, "b") is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"12\n", "12"), (b"12_3\n", "12_3"), (b"", ""), (b"\0\0\0", ""), (b"\xff\n", ""), (b"12 x\n", "")],
)
def test_the_slurm_id_of_a_started_job_is_empty_if_its_file_is_damaged(tmp_path, content, expected):
    files = JobFiles(tmp_path)
    assert files.started_as("a") is None
    files.started("a").write_bytes(content)
    assert files.started_as("a") == expected


def test_a_later_manager_reads_the_array_files_and_the_output_of_array_tasks(tmp_path):
    first = JobFiles(tmp_path)
    first.write_array(ARRAY)
    later = JobFiles(tmp_path)
    assert later.array_of("b") is None
    for array in later.read_arrays():
        later.note(array)
    assert later.array_of("b") == ARRAY == later.arrays[ARRAY.name]
    assert later.log_tail("b") == ""
    (tmp_path / "nni-EXPT-array-1-1.log").write_text("of the task\n")
    assert later.log_tail("b") == "of the task"
    later.log("b").write_text("of the job that was submitted again, alone\n")
    assert later.log_tail("b") == "of the job that was submitted again, alone"


class Sbatch:
    """Records the calls. Each call waits until the test sets `is_open`, and then returns or raises the next error."""

    def __init__(self, *errors):
        self.calls, self.errors, self.is_open = [], [*errors], asyncio.Event()

    async def __call__(self, jobs):
        self.calls.append("".join(job.job_id for job in jobs))
        await self.is_open.wait()
        if self.errors:
            raise self.errors.pop(0)


def submitted(submissions, names):
    return [asyncio.ensure_future(submissions.submit(Job(name, name))) for name in names]


async def test_jobs_that_arrive_while_three_calls_of_sbatch_run_are_submitted_together():
    sbatch = Sbatch()
    submissions, jobs = Submissions(sbatch), []
    for name in "abc":
        jobs += submitted(submissions, name)
        # Two turns of the event loop start the call of sbatch for this job.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    jobs += submitted(submissions, "defgh")
    await asyncio.sleep(0)
    assert sbatch.calls == ["a", "b", "c"]
    sbatch.is_open.set()
    await asyncio.gather(*jobs)
    assert sbatch.calls == ["a", "b", "c", "defgh"]


async def test_if_slurm_permanently_refuses_an_array_its_jobs_and_later_jobs_are_submitted_one_by_one():
    sbatch = Sbatch(UserError("no arrays"), UserError("no such partition"))
    sbatch.is_open.set()
    submissions = Submissions(sbatch)
    first, *others = submitted(submissions, "abc")
    with pytest.raises(UserError, match="no such partition"):
        await first
    await asyncio.gather(*others)
    await asyncio.gather(*submitted(submissions, "de"))
    assert sbatch.calls == ["abc", "a", "b", "c", "d", "e"]


async def test_every_job_of_an_array_gets_the_retryable_error_of_the_submission_of_the_array():
    sbatch = Sbatch(RetryableError("slurmctld is down"))
    sbatch.is_open.set()
    jobs = submitted(Submissions(sbatch), "abc")
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [str(error) for error in results] == ["slurmctld is down"] * 3
    assert sbatch.calls == ["abc"]


async def test_a_cancelled_caller_does_not_affect_other_callers_and_close_cancels_all_waiting_callers():
    sbatch = Sbatch()
    submissions = Submissions(sbatch)
    first, second = submitted(submissions, "ab")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    sbatch.is_open.set()
    await second
    sbatch.is_open.clear()
    third = submitted(submissions, "cdefgh")
    await asyncio.sleep(0)
    await submissions.close()
    results = await asyncio.gather(*third, return_exceptions=True)
    assert {type(error) for error in results} == {asyncio.CancelledError}


async def test_a_job_is_not_submitted_if_its_caller_was_cancelled_before_the_call_of_sbatch():
    sbatch = Sbatch()
    submissions = Submissions(sbatch)
    busy = []
    for name in "abc":
        busy += submitted(submissions, name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    unwanted, wanted = submitted(submissions, "de")
    await asyncio.sleep(0)
    unwanted.cancel()
    await asyncio.sleep(0)
    sbatch.is_open.set()
    await asyncio.gather(*busy, wanted)
    assert sbatch.calls == ["a", "b", "c", "e"]


async def test_a_submission_after_close_raises_an_error():
    submissions = Submissions(Sbatch())
    await submissions.close()
    with pytest.raises(RetryableError, match="the manager is closing"):
        await submissions.submit(Job("a", "a"))
