"""The call of sbatch, the batch script and the environment of a job on Slurm."""

import json
import os
import subprocess
import sys
from dataclasses import replace

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


def test_every_slurm_key_is_rendered_as_the_corresponding_sbatch_option():
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


def test_unset_slurm_keys_and_zero_gpus_add_no_sbatch_options():
    assert render.sbatch_options(SlurmSection(gpus=0)) == []


def test_the_sbatch_command_disables_requeue_and_appends_to_the_output_file():
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


def test_each_task_of_an_array_has_an_output_file_of_its_own():
    command = render.sbatch_command(
        FULL, "nni-EXPT-array-1", "/home/ada", "/home/ada/100%/nni-EXPT-array-1", 12
    )
    assert {"--array=0-11", "--output=/home/ada/100%%/nni-EXPT-array-1-%a.log"} <= {*command}


def test_each_task_of_an_array_has_the_settings_of_its_job_and_no_others(tmp_path):
    settings = [
        SETTINGS,
        replace(SETTINGS, job_id="trial2", trial_id="trial2", token="c0ff'ee $x"),
        replace(SETTINGS, job_id="worker", trial_id=None, warm_imports=("torch",)),
    ]
    environs = [each.to_environ() for each in settings]
    (tmp_path / "run.sh").write_text(
        f"exec {sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    )
    folder, task = tmp_path / "the jobs", render.task_snippet(environs)
    folder.mkdir()
    script = render.batch_script(str(tmp_path / "run.sh"), str(folder), task=task)
    assert "c0ff" not in script
    for number, environ in enumerate(environs):
        variables = {**render.array_environ(environs), "SLURM_ARRAY_TASK_ID": f"{number}", "PATH": os.defpath}
        done = subprocess.run(
            ["bash"], input=script, env=variables, capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)
        assert {name: value for name, value in found.items() if name.startswith("TRIAL_KEEPER_")} == environ
        assert not [name for name in found if name.startswith("SLURM_ARRAY_")]
        assert (folder / f"{settings[number].job_id}.started").exists()


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
def test_a_slurm_time_limit_is_converted_to_seconds_or_to_none(limit, seconds):
    assert render.seconds_of(limit) == seconds


@pytest.mark.parametrize(
    ("limit", "notice_s"), [(None, 60), ("4:00:00", 60), ("2", 30), ("1", 15), ("0:01", 1)]
)
def test_the_slurm_signal_precedes_the_time_limit_by_a_minute_or_by_less_if_the_limit_is_short(
    limit, notice_s
):
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


def test_a_command_on_a_login_node_receives_its_arguments_and_its_stdin_and_the_job_settings():
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


def test_a_batch_script_that_starts_a_second_time_does_not_run_its_job_again(tmp_path):
    run_script, started = tmp_path / "run it's.sh", tmp_path / "a job.started"
    run_script.write_text("echo runs; exit 7")
    script = render.batch_script(str(run_script), str(started))
    first, second = run(script), run(script)
    assert (first.returncode, first.stdout) == (7, "runs\n")
    assert (second.returncode, second.stdout) == (1, "")
    assert "does not run again" in second.stderr


def test_a_job_exits_with_the_workspace_exit_code_if_its_node_lacks_the_shared_folder(tmp_path):
    done = run(render.batch_script("run.sh", str(tmp_path / "absent" / "started")))
    assert done.returncode == KeeperExit.WORKSPACE
    assert "absent" in done.stderr
    assert "use a folder that the compute nodes share" in done.stderr


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, []),
        ({"gpus": 2}, ["--nv"]),
        ({"gres": "gpu:a100:2"}, ["--nv"]),
        ({"gres": "license:1"}, []),
        ({"gpus": 2, "container_args": ("--rocm", "--bind=/my data")}, ["--rocm", "--bind=/my data"]),
    ],
)
@pytest.mark.parametrize("program", ["apptainer", "singularity"])
def test_a_job_with_an_image_runs_its_keeper_in_a_container(tmp_path, monkeypatch, program, keys, options):
    (tmp_path / program).write_text('#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@"\n')
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    section = SlurmSection(container_image="/home/ada/my train.sif", **keys)
    container = render.container_snippet(section, "/home/ada/its folder")
    done = run(render.batch_script("/a folder/run.sh", str(tmp_path / "started"), container))
    assert done.stdout.splitlines() == [
        *(program, "exec", "--bind=/home/ada/its folder", *options, "/home/ada/my train.sif"),
        *("bash", "/a folder/run.sh"),
    ]


def test_a_job_on_a_node_without_apptainer_exits_and_prints_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)
    container = render.container_snippet(SlurmSection(container_image="docker://train"), "/home/ada")
    done = run(render.batch_script("run.sh", str(tmp_path / "started"), container))
    assert done.returncode == KeeperExit.MISSING
    assert "cannot find apptainer on this node; load its module before nnictl create" in done.stderr


def test_an_environment_variable_named_in_container_does_not_change_a_job_without_an_image(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("in_container", "false")
    (tmp_path / "run.sh").write_text("echo runs")
    done = run(render.batch_script(str(tmp_path / "run.sh"), str(tmp_path / "started"), ""))
    assert done.stdout == "runs\n"
