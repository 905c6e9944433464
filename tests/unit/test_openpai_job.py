"""The OpenPAI job of a trial: its content, and how commands are passed to the keeper."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openpai_jobs import REMOVED, a_job, text_of

from nni_manager.domain.completion import TaskRole
from nni_manager.errors import UserError
from nni_manager.training_services.openpai.export import MASK, without_secrets
from nni_manager.training_services.openpai.job import (
    job_name,
    job_prefix,
    render_command,
    render_job,
    render_run_script,
    template_of,
)
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.protocol import Storage, parse
from nni_manager.training_services.openpai.render import render
from nni_manager.training_services.openpai.section import PaiConfig
from trial_keeper.settings import KeeperSettings

MOUNT = "/mnt/confignfs-data"
SETTINGS = KeeperSettings(
    "EXPT", "trial1", f"{MOUNT}/EXPT", "c0ffee", trial_id="trial1", mount=MOUNT, relay_output=True
)
STORAGE = {"storages": [{"name": "confignfs-data"}]}


def pai(**changed):
    """A configuration whose jobs are described in the experiment file."""
    described = {
        "image": "msranni/nni:latest",
        "storage_name": "confignfs-data",
        "virtual_cluster": "default",
    }
    resources = {"gpu": 0, "cpu": 1, "memory_mb": 8196}
    where = {"host": "h", "user": "u", "token": "t", "password": None, "storage": Path("/s"), "mount": MOUNT}
    return PaiConfig(**where | described | resources | changed)


def with_job_file(job, **changed):
    """A configuration whose jobs are described in a job file."""
    nothing = dict.fromkeys(("image", "storage_name", "virtual_cluster", "gpu", "cpu", "memory_mb"))
    return pai(**nothing | {"job_file": Path("job.yml"), "job_text": text_of(job)} | changed)


def rendered(config, keeper=SETTINGS):
    return parse(render_job(template_of(config), "nni_exp_EXPT_trial_trial1", keeper))


def environ_of(script, folder):
    """The `TRIAL_KEEPER_` variables that the script of a task passes to run.sh."""
    run = folder / "run.sh"
    run.write_text('env -0 > "${BASH_SOURCE[0]%/*}/environ"\n')
    done = subprocess.run(
        ["bash"],
        input=script.encode(),
        capture_output=True,
        timeout=DEADLINE_S,
        env={"PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    entries = (folder / "environ").read_bytes().split(b"\0")
    pairs = (entry.decode().partition("=") for entry in entries if entry.startswith(b"TRIAL_KEEPER_"))
    return {name: value for name, _, value in pairs}


# ---- the job


def test_the_job_of_a_trial_has_the_values_that_nni_sets():
    job = rendered(pai())
    assert job.name == "nni_exp_EXPT_trial_trial1"
    assert (job.virtual_cluster, job.job_retry_count, job.gang_allocation) == ("default", 0, True)
    (role,) = job.task_roles
    assert (role.name, role.instances) == ("taskrole", 1)
    assert (role.completion.min_failed, role.completion.min_succeeded) == (1, -1)
    assert (role.resources.gpu, role.resources.cpu, role.resources.memory_mb) == (0, 1, 8196)
    assert job.prerequisite(role.docker_image).values["uri"] == "msranni/nni:latest"
    assert [storage.mount_path for storage in job.storages] == [MOUNT]
    assert job.extras["submitFrom"] == "submit-job-v2"


@pytest.mark.parametrize(
    ("mount", "storage"),
    [
        (MOUNT, {"name": "confignfs-data"}),
        (f"{MOUNT}/teams/a", {"name": "confignfs-data"}),
        ("/data", {"name": "confignfs-data", "mountPath": "/data"}),
    ],
)
def test_the_storage_is_mounted_at_the_path_that_the_experiment_file_sets(mount, storage):
    assert template_of(pai(mount=mount)).job.extras["storages"] == [storage]


def test_job_names_equal_the_names_that_nni_uses():
    assert job_name("EXPT", "aB3dE") == "nni_exp_EXPT_trial_aB3dE"
    assert job_name("EXPT", "env-12") == "nni_exp_EXPT_env_12"
    assert job_name("EXPT", "env-12").startswith(job_prefix("EXPT"))


def test_the_token_is_stored_only_in_the_secrets_of_the_job():
    text = render_job(template_of(pai()), "name", SETTINGS)
    assert text.count("c0ffee") == 1
    # OpenPAI masks the lines after "secrets:" up to the next line that starts with a letter. So "secrets:" must be a line of its
    # own, with the secrets below it.
    (line,) = [line for line in text.splitlines() if line.startswith("secrets:")]
    assert line == "secrets:"
    assert "c0ffee" not in without_secrets(parse(text))
    assert MASK in without_secrets(parse(text))


def test_rendering_a_job_twice_yields_the_same_text():
    assert render_job(template_of(pai()), "n", SETTINGS) == render_job(template_of(pai()), "n", SETTINGS)


MADE = Path(__file__).parents[1] / "golden/openpai/made"
REUSED = KeeperSettings(
    *("EXPT", "env-0", f"{MOUNT}/EXPT", "c0ffee"),
    mount=MOUNT,
    relay_output=True,
    max_trials=50,
    warm_imports=("numpy", "torch.nn"),
)
TEAM = a_job(
    (
        ("taskRoles", "ps"),
        {**a_job()["taskRoles"]["worker"], "instances": 1, "commands": ["serve 'it'", "sleep 9"]},
    ),
    parameters={"lr": 0.1},
    secrets={"word": "w"},
    extras={**STORAGE, "com.example.x": [1, "yes"]},
)


@pytest.mark.parametrize(
    ("file", "config", "name", "keeper"),
    [
        ("trial.yaml", pai(), job_name("EXPT", "trial1"), SETTINGS),
        ("reused.yaml", pai(mount="/data", virtual_cluster=None), job_name("EXPT", "env-0"), REUSED),
        ("job_file.yaml", with_job_file(TEAM), job_name("EXPT", "trial1"), SETTINGS),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".yaml") else "",
)
def test_a_rendered_job_matches_its_golden_file(file, config, name, keeper):
    assert render_job(template_of(config), name, keeper) == (MADE / file).read_text()


# ---- job files


def test_a_job_from_a_job_file_keeps_unknown_keys_and_gets_a_new_name():
    job = a_job(
        name="mine",
        version=1.5,
        parameters={"lr": 0.1},
        secrets={"word": "w"},
        extras={**STORAGE, "com.example.x": {"a": [1, None, "yes"]}, "gangAllocation": False},
    )
    values = rendered(with_job_file(job)).document.value
    assert values["name"] == "nni_exp_EXPT_trial_trial1"
    assert values["extras"] == job["extras"]
    assert (values["version"], values["parameters"]) == (1.5, {"lr": 0.1})
    assert values["secrets"] == {"word": "w", "trial_keeper_token": "c0ffee"}
    assert values["prerequisites"] == job["prerequisites"]


def test_each_role_of_a_job_file_runs_a_keeper_that_receives_the_command_of_the_role(tmp_path):
    job = a_job(
        (
            ("taskRoles", "ps"),
            {**a_job()["taskRoles"]["worker"], "instances": 1, "commands": ["serve", "it's"]},
        ),
        (("taskRoles", "worker", "completion"), {"minSucceededInstances": 2, "minFailedInstances": -1}),
        extras={"storages": [{"name": "s", "mountPath": str(tmp_path)}]},
    )
    config = with_job_file(job, mount=str(tmp_path))
    keeper = KeeperSettings("EXPT", "trial1", str(tmp_path), "c0ffee", trial_id="trial1", mount=str(tmp_path))
    roles = {each.role.name: each for each in render(rendered(config, keeper)).roles}
    expected = {name: environ_of(role.scripts.user, tmp_path) for name, role in roles.items()}
    assert {name: environ["TRIAL_KEEPER_COMMAND"] for name, environ in expected.items()} == {
        "worker": "echo hello",
        "ps": "serve\nit's",
    }
    assert all(environ["TRIAL_KEEPER_TOKEN"] == "c0ffee" for environ in expected.values())
    assert template_of(config).completion.roles == (TaskRole("worker", 2, -1, 2), TaskRole("ps", 1, 1, 1))


def test_openpai_templates_are_expanded_in_the_commands_of_a_job_file(tmp_path):
    awkward = "a'b\"c $HOME `x` \\ <&>\nEOF"
    job = a_job(
        (
            ("taskRoles", "worker", "commands"),
            ["train <% $parameters.lr %> '<% $parameters.text %>' <% $secrets.word %>"],
        ),
        parameters={"lr": 0.0001, "text": awkward},
        secrets={"word": "w'o"},
        extras={"storages": [{"name": "s", "mountPath": str(tmp_path)}]},
    )
    keeper = KeeperSettings("EXPT", "t", str(tmp_path), "c0ffee", trial_id="t", mount=str(tmp_path))
    (role,) = render(rendered(with_job_file(job, mount=str(tmp_path)), keeper)).roles
    command = environ_of(role.scripts.user, tmp_path)["TRIAL_KEEPER_COMMAND"]
    assert command == f"train 0.0001 '{awkward}' w'o"


def test_the_error_for_an_invalid_job_file_contains_the_line_number():
    with pytest.raises(ProtocolInvalid, match=r"job\.yml:\d+:\d+: cannot use taskRoles\.worker\.dockerImage"):
        template_of(with_job_file(a_job((("taskRoles", "worker", "dockerImage"), "none"), extras=STORAGE)))


@pytest.mark.parametrize(
    ("extras", "expected"),
    [
        (REMOVED, "it mounts no storage"),
        ({"storages": [{"name": "other"}]}, "it mounts other at /mnt/other, not /mnt/confignfs-data"),
    ],
)
def test_a_job_file_that_does_not_mount_the_workspace_is_refused(extras, expected):
    job = a_job() if extras is REMOVED else a_job(extras=extras)
    with pytest.raises(
        ProtocolInvalid, match=f"cannot use extras.storages: {expected}.*; write e.g. storages:"
    ):
        template_of(with_job_file(job))


def test_keys_missing_in_a_job_file_come_from_the_experiment_file_whose_unused_keys_cause_warnings():
    template = template_of(
        with_job_file(a_job(), storage_name="confignfs-data", virtual_cluster="vc1", image="idle", cpu=3)
    )
    assert (template.job.storages, template.job.virtual_cluster) == (
        (Storage("confignfs-data", MOUNT),),
        "vc1",
    )
    assert [warning.partition(":")[0] for warning in template.warnings] == [
        "trial.image has no effect",
        "trial.cpuNum has no effect",
    ]
    own = a_job(defaults={"virtualCluster": "own"}, extras=STORAGE)
    assert template_of(with_job_file(own, virtual_cluster="vc1")).job.virtual_cluster == "own"


@pytest.mark.parametrize("gang", [{}, {"gangAllocation": False}])
def test_the_retries_of_a_job_file_are_removed_with_a_warning_that_names_max_trial_retry(gang):
    own = a_job((("taskRoles", "worker", "taskRetryCount"), 3), jobRetryCount=2, extras=STORAGE | gang)
    config = with_job_file(own)
    job = rendered(config)
    assert (job.job_retry_count, job.task_roles[0].task_retry_count) == (0, 0)
    warnings = template_of(config).warnings
    assert len(warnings) == 2
    for key, warning in zip(("jobRetryCount", "taskRoles.worker.taskRetryCount"), warnings, strict=True):
        assert re.match(rf"job\.yml:\d+:\d+: {key} has no effect: .* write maxTrialRetry into", warning)


def test_a_job_over_the_size_limit_of_openpai_is_refused():
    job = a_job((("taskRoles", "worker", "commands"), ["x" * 100_000]), extras=STORAGE)
    with pytest.raises(UserError, match="exceeds 96 kB"):
        template_of(with_job_file(job))


# ---- quoting

COMMANDS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from(list("'\"$`\\\n\r\t !#&;()<>{}[]*?~\x01\x7f")),
    min_size=1,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COMMANDS)
def test_every_command_reaches_the_keeper_unchanged(tmp_path, command):
    keeper = KeeperSettings("EXPT", "t", str(tmp_path), "c0ffee", mount=str(tmp_path))
    assert environ_of(render_command(keeper, command), tmp_path)["TRIAL_KEEPER_COMMAND"] == command


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COMMANDS.filter(lambda text: "<%" not in text and text.strip()))
def test_every_command_in_a_job_file_reaches_the_keeper_after_template_expansion(tmp_path, command):
    job = a_job(
        (("taskRoles", "worker", "commands"), [command]),
        extras={"storages": [{"name": "s", "mountPath": str(tmp_path)}]},
    )
    keeper = KeeperSettings("EXPT", "t", str(tmp_path), "c0ffee", mount=str(tmp_path))
    (role,) = render(rendered(with_job_file(job, mount=str(tmp_path)), keeper)).roles
    written = json.loads(text_of(job))["taskRoles"]["worker"]["commands"][0].strip()
    assert environ_of(role.scripts.user, tmp_path)["TRIAL_KEEPER_COMMAND"] == written


@pytest.mark.parametrize("mount", ["/mnt/a b", "/mnt/it's", "/mnt/$HOME", '/mnt/"q"'])
def test_the_workspace_path_may_contain_any_character(tmp_path, mount):
    folder = tmp_path / mount[1:]
    folder.mkdir(parents=True)
    keeper = KeeperSettings("EXPT", "t", str(folder), "c0ffee", trial_id="t", mount=str(folder))
    assert environ_of(render_command(keeper, None), folder)["TRIAL_KEEPER_WORKSPACE"] == str(folder)


# ---- run.sh


def run_script(folder, keeper, **environ):
    """Run run.sh with `keeper` as the script of trial-keeper; with None, no trial-keeper is on the PATH."""
    (folder / "run.sh").write_text(render_run_script())
    tools = folder / "bin"
    tools.mkdir()
    if keeper is not None:
        (tools / "trial-keeper").write_text(f"#!/bin/bash\n{keeper}\n")
        (tools / "trial-keeper").chmod(0o755)
    return subprocess.run(
        ["/bin/bash", str(folder / "run.sh")],
        env={"PATH": str(tools), **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_run_sh_starts_the_keeper_in_the_workspace_folder(tmp_path):
    done = run_script(tmp_path, "pwd")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}\n", "")


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (3, 3), (115, 115), (128, 128), (137, 1), (143, 1), (255, 1)]
)
def test_the_container_exits_with_code_1_if_openpai_would_retry_the_original_exit_code(
    tmp_path, code, expected
):
    assert run_script(tmp_path, f"exit {code}").returncode == expected


def test_a_signal_to_the_process_group_of_a_task_reaches_the_keeper_only_once(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "trial-keeper").write_text(
        "#!/bin/bash\ntrap 'count=$((count + 1))' TERM\necho ready\nread -t 20 -u 3 3< <(sleep 20)\n"
        'sleep 0.2\necho "ends after $count"\nexit 7\n'
    )
    (tools / "trial-keeper").chmod(0o755)
    (tmp_path / "run.sh").write_text(render_run_script())
    keeper = KeeperSettings("EXPT", "t", str(tmp_path), "c0ffee", trial_id="t", mount=str(tmp_path))
    task = subprocess.Popen(
        ["bash", "-eu", "-c", render_command(keeper, None)],
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with task:
        assert task.stdout.readline() == "ready\n"
        os.killpg(task.pid, signal.SIGTERM)
        assert task.stdout.read() == "ends after 1\n"
    assert task.returncode == 7


def test_a_container_without_a_keeper_prints_a_remedy_and_exits_with_code_115(tmp_path):
    done = run_script(tmp_path, None)
    assert done.returncode == 115
    assert (
        "cannot find trial-keeper in this container; install trial-keeper-bundle in nnictl's Python"
        in done.stderr
    )


@pytest.mark.parametrize(("has_mount", "code"), [(False, 105), (True, 101)])
def test_a_container_without_the_storage_exits_with_code_105_or_101(tmp_path, has_mount, code):
    mount = tmp_path / "mount"
    if has_mount:
        mount.mkdir()
    keeper = KeeperSettings("EXPT", "t", f"{mount}/EXPT", "c0ffee", trial_id="t", mount=str(mount))
    done = subprocess.run(["bash", "-e", "-c", render_command(keeper, None)], timeout=DEADLINE_S, check=False)
    assert done.returncode == code
