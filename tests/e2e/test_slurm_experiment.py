"""Experiments on a real Slurm, as users run them with nnictl."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from amounts import IS_THOROUGH
from free_ports import free_port_pair
from real_experiment import wait_until
from slurm_here import NODES, a_slurm_here
from user_home import environ_of, left_in, metrics_of, run_nnictl

from nni_manager.engine.submission_gate import MOST_AT_ONCE, RETRY_S
from nni_manager.training_services.slurm.service import POLL_S

ROOT = Path(__file__).parents[2]
FILE = "digits/config_slurm.yml"
# The thorough form of the test with a submit limit runs 1000 jobs, which takes about ten minutes.
JOBS, MAX_SUBMIT_JOBS = (1000, 100) if IS_THOROUGH else (24, 6)
LIMIT = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
WAITING = {"not started yet: Resources", "not started yet: Priority"}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def slurm():
    with a_slurm_here() as cluster:
        yield cluster


@pytest.fixture
def work(tmp_path):
    """A folder with the digits example, in a home of its own."""
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "examples" / "digits", folder / "digits")
    return folder


@pytest.fixture
def nnictl(slurm, work):
    def run(*arguments, **environ):
        return run_nnictl(work, slurm.variables | environ, *arguments)

    return run


def write(work, *replaced):
    """Replace texts of the example's experiment file. Each replaced text must occur exactly once."""
    text = (work / FILE).read_text()
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (work / FILE).write_text(text)


def create(nnictl, *options):
    return nnictl("create", "--config", FILE, "--port", str(free_port_pair()), *options)


def trials(nnictl, experiment_id):
    return json.loads(nnictl("trial", "ls", experiment_id, "--json").stdout)


@pytest.mark.smoke
def test_the_digits_example_runs_its_trials_on_both_nodes(slurm, work, nnictl):
    exclusive = ("  platform: slurm\n", "  platform: slurm\n  extraArgs: [--exclusive]\n")
    write(
        work, ("maxTrialNumber: 20", "maxTrialNumber: 4"), ("reuseMode: true", "reuseMode: false"), exclusive
    )
    done = create(nnictl, "--foreground")
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    found = trials(nnictl, experiment_id)
    assert [(each["status"], each["value"] is not None) for each in found] == [("SUCCEEDED", True)] * 4
    jobs = slurm.run("squeue", "-h", "--array", "-t", "all", "-o", "%j %T %N").splitlines()
    # A job has the name of its trial or of its job array. Both names contain the id of the experiment.
    assert [job.startswith(f"nni-{experiment_id}-") for job in jobs] == [True] * 4
    assert {tuple(job.split()[1:]) for job in jobs} == {("COMPLETED", node) for node in NODES}
    assert left_in(work) == []


def test_the_digits_example_runs_several_trials_per_job_with_the_same_results_as_on_this_machine(
    slurm, work, nnictl
):
    write(
        work,
        ("maxTrialNumber: 20", "maxTrialNumber: 4"),
        ("name: TPE\n  classArgs:\n", "name: Random\n  classArgs:\n    seed: 1\n"),
    )
    done = create(nnictl, "--foreground")
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    assert [each["status"] for each in trials(nnictl, experiment_id)] == ["SUCCEEDED"] * 4
    there = metrics_of(nnictl, experiment_id)
    wait_until(lambda: not slurm.live(), "no job is left")
    # The trials ran in two jobs, or in one job array with two tasks. squeue --array prints two lines in both cases.
    names = slurm.run("squeue", "-h", "--array", "-t", "all", "-o", "%j").split()
    assert len(names) == 2
    assert all(name.startswith(f"nni-{experiment_id}-") for name in names)
    path = work / FILE
    path.write_text(path.read_text().partition("  platform: slurm\n")[0] + "  platform: local\n")
    done = create(nnictl, "--foreground")
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    assert metrics_of(nnictl, experiment_id) == there
    assert left_in(work) == []


def test_a_waiting_trial_shows_the_pending_reason_of_slurm_and_is_cancelled_with_its_experiment(
    slurm, work, nnictl
):
    write(work, ("reuseMode: true", "reuseMode: false"))
    slurm.submit("sleep 1000", "--nodes=2", "--exclusive", "--job-name=large")
    wait_until(lambda: slurm.states()["large"] == "RUNNING", "the cluster is full")
    created = create(nnictl)
    assert created.returncode == 0, created.stdout + created.stderr
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", created.stdout)
    # At first, squeue may show one reason for both tasks of the job array. Each task has its own reason when Slurm has separated
    # the first task from the array.
    wait_until(
        lambda: (
            len(shown := [each["message"] for each in trials(nnictl, experiment_id)]) == 2
            and WAITING.issuperset(shown)
        ),
        "the reasons are shown",
    )
    stopped = nnictl("stop", experiment_id)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_until(lambda: slurm.live() == [], "no job is left")
    assert {state for name, state in slurm.states().items() if name != "large"} == {"CANCELLED"}
    assert left_in(work) == []


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "partition: nosuch",
            "Invalid partition name specified; correct partition in the experiment file, `sinfo",
        ),
        ("gres: gpu:1", "Invalid generic resource (gres) specification; correct gres or gpus"),
        ("constraint: a100", "Invalid feature specification; correct constraint"),
        ("nodes: 3", "Requested node configuration is not available; correct nodes, gres or cpusPerTask"),
    ],
)
@pytest.mark.smoke
def test_the_error_of_nnictl_create_names_the_key_to_correct_if_slurm_refuses_the_experiment_file(
    work, nnictl, key, words
):
    write(work, ("  platform: slurm\n", f"  platform: slurm\n  {key}\n"))
    refused = create(nnictl)
    assert refused.returncode == 1
    assert words in re.sub(r"\s+", " ", refused.stderr)


def test_the_error_of_nnictl_create_recommends_a_login_node_if_slurm_is_missing(work, nnictl, tmp_path):
    (tmp_path / "bin").mkdir()
    for program in ("bash", "env"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program))
    refused = create(lambda *arguments: nnictl(*arguments, PATH=f"{tmp_path / 'bin'}"))
    assert refused.returncode == 1
    assert "cannot find Slurm's sbatch on PATH; run nnictl on a login node" in re.sub(
        r"\s+", " ", refused.stderr
    )


def test_nnictl_create_reports_an_unreachable_slurm_controller(slurm, nnictl):
    slurm.stop_controller()
    refused = create(nnictl)
    assert refused.returncode == 1
    assert "cannot reach Slurm" in refused.stderr
    assert "check slurmctld with `scontrol ping`" in re.sub(r"\s+", " ", refused.stderr)


def test_nnictl_create_warns_of_a_submit_limit_and_trials_wait_until_the_limit_permits_them(
    work, nnictl, tmp_path
):
    """Slurm's own limit, MaxSubmitJobs, needs accounting. Instead, a script replaces sbatch, and refuses the first jobs with
    Slurm's error message.
    """
    write(work, ("maxTrialNumber: 20", "maxTrialNumber: 1"))
    refused = tmp_path / "refused"
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f"#!/bin/bash\necho >> {refused}\n"
        f'[ "$(wc -l < {refused})" -gt 3 ] && exec {shutil.which("sbatch")} "$@"\n'
        f'echo "sbatch: error: Batch job submission failed: {LIMIT}" >&2\nexit 1\n'
    )
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{environ_of(work)['PATH']}"
    done = create(lambda *arguments: nnictl(*arguments, PATH=path), "--foreground")
    assert done.returncode == 0, done.stdout + done.stderr
    assert LIMIT in re.sub(r"\s+", " ", done.stdout + done.stderr)
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    assert [each["status"] for each in trials(nnictl, experiment_id)] == ["SUCCEEDED"]


def counting(folder, command, then=""):
    """Create a wrapper of a Slurm command that appends the time of each call to a file; return the file."""
    calls = folder / f"{command}-calls"
    program = folder / command
    program.write_text(f'#!/bin/bash\ndate +%s.%N >> {calls}\n{then}\nexec {shutil.which(command)} "$@"\n')
    program.chmod(0o755)
    calls.touch()
    return calls


@pytest.mark.timeout(3000 if IS_THOROUGH else 400)
def test_jobs_above_a_submit_limit_are_started_later_with_few_refusals_and_one_squeue_call_per_poll(
    work, nnictl, tmp_path
):
    """Slurm's own limit, MaxSubmitJobs, needs accounting. Instead, a script replaces sbatch, and limits the number of the user's
    jobs.
    """
    write(
        work,
        ("maxTrialNumber: 20", f"maxTrialNumber: {JOBS}"),
        ("trialConcurrency: 2", f"trialConcurrency: {JOBS}"),
        ("reuseMode: true", "reuseMode: false"),
        ("trialCommand: python3 train.py", "trialCommand: 'true'"),
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    refused = programs / "refused"
    refused.touch()
    submitted = counting(
        programs,
        "sbatch",
        "[[ \" $* \" =~ ' '--array=0-([0-9]+)' ' ]] && tasks=$((BASH_REMATCH[1] + 1)) || tasks=1\n"
        f"there=$({shutil.which('squeue')} --noheader --array | wc -l)\n"
        f"[ $((there + tasks)) -le {MAX_SUBMIT_JOBS} ] || {{ echo >> {refused};"
        f' echo "sbatch: error: Batch job submission failed: {LIMIT}" >&2; exit 1; }}',
    )
    polled = counting(programs, "squeue")
    path = f"{programs}:{environ_of(work)['PATH']}"
    began_s = time.monotonic()
    done = create(lambda *arguments: nnictl(*arguments, PATH=path), "--foreground")
    took_s = time.monotonic() - began_s
    assert f"none of {JOBS} trials has a value" in done.stderr, done.stdout + done.stderr
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    assert [each["status"] for each in trials(nnictl, experiment_id)] == ["SUCCEEDED"] * JOBS
    counts = {each.name: len(each.read_text().splitlines()) for each in (submitted, refused, polled)}
    # sbatch is called once to check the file, once for each job or job array, and once for each refusal.
    assert counts["sbatch-calls"] <= JOBS + 1 + counts["refused"]
    assert 0 < counts["refused"] <= MOST_AT_ONCE + took_s / RETRY_S, counts
    # At the end of the experiment, the manager polls more often than every POLL_S seconds, so 30 more calls are permitted.
    assert counts["squeue-calls"] <= took_s / POLL_S + 30, counts
