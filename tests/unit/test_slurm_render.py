"""The call of sbatch, the batch script and the environment of a job on Slurm."""

import json
import subprocess
import sys

import pytest

from nni_manager.training_services.slurm import render
from nni_manager.training_services.slurm.section import SlurmSection
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import KeeperSettings

SETTINGS = KeeperSettings("EXPT", "trial1", "/home/ada/EXPT", "c0ffee", trial_id="trial1")
FULL = SlurmSection(
    partition="gpu",
    account="vision",
    qos="high",
    time_limit="1-12:00:00",
    gres="gpu:a100:2",
    gpus=2,
    cpus_per_task=4,
    memory_mb=16384,
    constraint="a100",
    nodes=2,
    ntasks=8,
    extra_args=("--exclusive", "--nice=100"),
)


def test_every_key_is_the_option_of_sbatch_of_its_name():
    assert render.sbatch_options(FULL) == [
        *(
            "--partition=gpu",
            "--account=vision",
            "--qos=high",
            "--time=1-12:00:00",
            "--gres=gpu:a100:2",
            "--gpus=2",
        ),
        *("--cpus-per-task=4", "--mem=16384M", "--constraint=a100", "--nodes=2", "--ntasks=8"),
        *("--exclusive", "--nice=100"),
    ]


def test_keys_that_are_not_set_leave_the_choice_to_slurm():
    assert render.sbatch_options(SlurmSection(gpus=0)) == []


def test_a_job_is_never_requeued_and_its_output_is_kept_if_it_starts_again():
    command = render.sbatch_command(FULL, "nni-EXPT-trial1", "/home/ada/100%", "/home/ada/100%/trial1.log")
    assert command[:2] == ["sbatch", "--parsable"]
    assert {
        "--job-name=nni-EXPT-trial1",
        "--chdir=/home/ada/100%",
        "--output=/home/ada/100%%/trial1.log",
        "--open-mode=append",
        "--no-requeue",
        "--signal=B:TERM@60",
        "--export=ALL",
    } <= {*command}


def test_no_option_contains_the_token():
    command = render.sbatch_command(FULL, "nni-EXPT-trial1", "/home/ada", "/home/ada/trial1.log")
    assert "c0ffee" not in " ".join(command)
    assert "c0ffee" not in render.batch_script("/home/ada/run.sh", "/home/ada/started")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("4:00:00", 14400),
        ("2-12", 216000),
        ("1-00:30", 88200),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
    ],
)
def test_a_time_limit_of_slurm_is_a_number_of_seconds(limit, seconds):
    assert render.seconds_of(limit) == seconds


@pytest.mark.parametrize(
    ("limit", "notice_s"), [(None, 60), ("4:00:00", 60), ("2", 30), ("1", 15), ("0:01", 1)]
)
def test_the_notice_before_a_short_time_limit_is_short(limit, notice_s):
    assert render.notice_s(limit) == notice_s


def test_a_job_inherits_no_variables_of_the_slurm_job_that_runs_the_manager():
    outside = {
        "PATH": "/bin",
        "SBATCH_ACCOUNT": "vision",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SQUEUE_STATES": "PD",
        "SCANCEL_INTERACTIVE": "1",
        "TRIAL_KEEPER_TOKEN": "of another job",
    }
    kept = {"PATH": "/bin", "SBATCH_ACCOUNT": "vision", "SLURM_CONF": "/etc/slurm.conf"}
    assert render.commands_environ(outside) == kept


PRINTS = "import json, os, sys; print(json.dumps([sys.argv[1:], sys.stdin.read(), dict(os.environ)]))"


def test_a_command_on_a_login_node_has_its_arguments_its_input_and_the_settings_of_a_job():
    outside = {
        "PATH": "/usr/bin:/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SQUEUE_STATES": "PD",
        "SBATCH_ACCOUNT": "vision",
        "MODULE": "loaded",
    }
    arguments, stdin = ["--job-name=it's $HOME", "`x`"], '#!/bin/bash\necho "$x" `y` \\\n'
    token = "c0ff'ee $x \\\n`y` ü"
    script = render.login_script(
        [sys.executable, "-c", PRINTS, *arguments], stdin, {"TRIAL_KEEPER_TOKEN": token}
    )
    done = subprocess.run(["bash"], input=script, env=outside, capture_output=True, text=True, check=True)
    found_arguments, found_stdin, environ = json.loads(done.stdout)
    assert (found_arguments, found_stdin) == (arguments, stdin)
    assert environ["TRIAL_KEEPER_TOKEN"] == token
    assert {name: value for name, value in environ.items() if name in outside} == {
        name: outside[name] for name in ("PATH", "SLURM_CONF", "SBATCH_ACCOUNT", "MODULE")
    }


def run(script):
    return subprocess.run(["bash"], input=script, capture_output=True, text=True, check=False)


def test_a_batch_script_runs_its_job_once_however_often_it_is_started(tmp_path):
    run_script, started = tmp_path / "run it's.sh", tmp_path / "a job.started"
    run_script.write_text("echo runs; exit 7")
    script = render.batch_script(str(run_script), str(started))
    first, second = run(script), run(script)
    assert (first.returncode, first.stdout) == (7, "runs\n")
    assert (second.returncode, second.stdout) == (1, "")
    assert "does not run again" in second.stderr


def test_a_job_on_a_node_without_the_shared_folder_has_the_exit_code_of_a_missing_workspace(tmp_path):
    done = run(render.batch_script("run.sh", str(tmp_path / "absent" / "started")))
    assert done.returncode == KeeperExit.WORKSPACE
    assert "absent" in done.stderr
    assert "use a folder that the compute nodes share" in done.stderr
