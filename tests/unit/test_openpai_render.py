"""The scripts of a job's tasks: deployments, both template stages, prerequisites and plugins, in order."""

import os
import subprocess
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from openpai_jobs import WORKER, a_job, text_of

from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.plugins import TaskEnvironment, calls_of, in_order
from nni_manager.training_services.openpai.protocol import parse
from nni_manager.training_services.openpai.render import render
from nni_manager.training_services.openpai.validation import cycle_in

GOLDEN = Path(__file__).parents[1] / "golden/openpai/jobs"
PLUGINS = "com.microsoft.pai.runtimeplugin"
PREFIX = ("extras", PLUGINS)


def rendered(*changes, environment=None, **top):
    return render(parse(text_of(a_job(*changes, **top))), environment)


def scripts(*changes, environment=None, **top):
    return rendered(*changes, environment=environment, **top).roles[0].scripts


def messages(error):
    return [each.message for each in error.value.diagnostics]


def with_plugins(*calls, **extras):
    return {"extras": {PLUGINS: list(calls), **extras}}


def rendered_text(path):
    """All parts of the rendered job as text, or the error."""
    try:
        job = render(parse(path.read_text(), path.name))
    except ProtocolInvalid as error:
        return f"{error}\n"
    lines = [f"warning: {warning}" for warning in job.warnings]
    for role in job.roles:
        completion, resources = role.role.completion, role.role.resources
        lines += [
            f"===== {role.role.name}: {role.role.instances} x {role.image} {role.image_auth or ''}".rstrip()
        ]
        lines += [f"fails at {completion.min_failed}, succeeds at {completion.min_succeeded}; {resources}"]
        parts = (
            ("init", role.scripts.init),
            ("pre", role.scripts.pre),
            ("user", [role.scripts.user]),
            ("post", role.scripts.post),
        )
        lines += [f"--- {name}\n{script.rstrip()}" for name, part in parts for script in part]
    protocol = job.protocol
    lines += [
        f"===== {protocol.virtual_cluster}, storages {protocol.storages}, retries {protocol.job_retry_count}"
    ]
    lines += [f"notify of {', '.join(protocol.notify_of) or 'nothing'}"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_rendered_example_jobs_of_the_documentation_match_their_golden_files(path):
    assert rendered_text(path) == path.with_suffix(".txt").read_text()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_script_of_the_example_jobs_is_valid_bash(path):
    if path.stem == "infiniband":
        return
    for role in render(parse(path.read_text())).roles:
        for script in (*role.scripts.init, *role.scripts.pre, role.scripts.user, *role.scripts.post):
            checked = subprocess.run(
                ["bash", "-n"], input=script, text=True, capture_output=True, timeout=DEADLINE_S
            )
            assert (checked.returncode, checked.stderr) == (0, "")


def test_commands_run_as_one_script_that_stops_at_the_first_failure():
    script = scripts(
        ((*WORKER, "commands"), ["  a=1  # comment", "echo $a", "cat <<END\n$a\nEND", "false", "echo never"])
    ).user
    ran = subprocess.run(["bash"], input=script, text=True, capture_output=True, timeout=DEADLINE_S)
    assert (ran.stdout, ran.returncode) == ("1\n1\n", 1)
    unset = subprocess.run(
        ["bash"],
        input=scripts(((*WORKER, "commands"), ["echo $nope", "echo x"])).user,
        text=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert (unset.stdout, unset.returncode != 0) == ("", True)
    piped = subprocess.run(
        ["bash"],
        input=scripts(((*WORKER, "commands"), ["false | cat", "echo x"])).user,
        text=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert (piped.stdout, piped.returncode) == ("", 1)


def test_a_deployment_adds_commands_before_and_after_the_commands_of_a_role():
    deployments = [
        {"name": "a", "taskRoles": {"worker": {"preCommands": ["never"]}}},
        {"name": "b", "taskRoles": {"worker": {"preCommands": [" before "], "postCommands": ["after"]}}},
    ]
    job = rendered(deployments=deployments, defaults={"deployment": "b"})
    assert job.roles[0].scripts.user.endswith("\n\nbefore\necho hello\nafter\n")
    assert scripts(deployments=deployments).user.endswith("\n\necho hello\n")


def test_the_value_of_a_secret_is_inserted_unescaped_into_the_script():
    job = rendered(((*WORKER, "commands"), ["echo '<% $secrets.t %>'"]), secrets={"t": 'a&"b'})
    assert job.roles[0].scripts.user.endswith("echo 'a&\"b'\n")


def test_an_image_login_may_refer_to_secrets_but_not_to_parameters():
    auth = {"username": "<% $parameters.u %>", "password": "<% $secrets.p %>", "other": 5}
    job = rendered((("prerequisites", 0, "auth"), auth), secrets={"p": 1.0}, parameters={"u": "x"})
    assert job.roles[0].image_auth == {"username": "<% $parameters.u %>", "password": "1", "other": "5"}
    assert [warning.key for warning in job.warnings] == ["prerequisites[0].auth.username"]


def test_an_undefined_reference_stays_as_text_and_causes_one_warning():
    text = text_of(
        a_job(((*WORKER, "commands"), ["echo <% $parameters.x %> <%$parameters.x%>", "<% $secrets.y %>"]))
    )
    assert [warning.message for warning in render(parse(text)).warnings] == [
        "taskRoles.worker.commands contains <% $parameters.x %>, which is not defined and stays as text; define it if needed",
        "taskRoles.worker.commands contains <% $secrets.y %>, which is not defined and stays as text; define it if needed",
    ]


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        (
            ["a", "b <% $parameters.x"],
            "taskRoles.worker.commands[1]: <% is not closed; write %> after the name",
        ),
        (["abc <%", "b"], "taskRoles.worker.commands[0]: <% is not closed; write %> after the name"),
        (["a <% #x %>", "b"], "taskRoles.worker.commands[0]: <% #x %> is not closed; remove it"),
        (["a", "<% /x %>"], "taskRoles.worker.commands[1]: <% /x %> closes no section; remove it"),
        (["<%= | | =%>"], "taskRoles.worker.commands[0]: <%= would change the tag delimiters; remove it"),
    ],
)
def test_the_error_for_an_invalid_template_contains_the_position_of_its_command(commands, message):
    with pytest.raises(ProtocolInvalid) as caught:
        rendered(((*WORKER, "commands"), commands))
    assert messages(caught) == [f"cannot use {message}"]
    assert caught.value.diagnostics[0].line > 1


def test_the_error_for_an_invalid_template_in_a_deployment_contains_the_key_of_the_deployment():
    deployments = [{"name": "a", "taskRoles": {"worker": {"postCommands": ["x", "<% y"]}}}]
    with pytest.raises(ProtocolInvalid) as caught:
        rendered(deployments=deployments, defaults={"deployment": "a"})
    assert [each.key for each in caught.value.diagnostics] == [
        "deployments[0].taskRoles.worker.postCommands[1]"
    ]


def test_errors_in_all_roles_and_plugins_are_reported_together():
    broken = {
        "dockerImage": "i",
        "resourcePerInstance": {"cpu": 1, "memoryMB": 1, "gpu": 0},
        "commands": ["<% x"],
    }
    call = {"plugin": "cmd", "parameters": {"preCommands": ["<% $secrets.a %>", "<% $output.uri %>"]}}
    with pytest.raises(ProtocolInvalid) as caught:
        rendered((("taskRoles", "other"), broken), **with_plugins(call))
    assert {each.key for each in caught.value.diagnostics} == {
        "taskRoles.other.commands[0]",
        f"extras.{PLUGINS}[0].parameters.preCommands[0]",
        f"extras.{PLUGINS}[0].parameters.preCommands[1]",
    }


def test_prerequisite_plugins_run_first_in_the_pre_script_and_last_in_the_post_script():
    def cmd(word):
        return {"preCommands": [f"echo {word} pre"], "postCommands": [f"echo {word} post"]}

    made = scripts(
        (
            ("prerequisites", 2),
            {"name": "s", "type": "script", "plugin": f"{PLUGINS}.cmd", "require": ["d"], **cmd("s")},
        ),
        (("prerequisites", 1), {"name": "d", "type": "data", "plugin": f"{PLUGINS}.cmd", **cmd("d")}),
        ((*WORKER, "prerequisites"), ["s", "d", "i"]),
        **with_plugins(
            {"plugin": "cmd", "parameters": cmd("x")},
            {"plugin": "cmd", "taskroles": ["y"], "parameters": cmd("y")},
        ),
    )
    assert [script.splitlines()[-1] for script in made.pre] == ["echo d pre", "echo s pre", "echo x pre"]
    assert [script.splitlines()[-1] for script in made.post] == ["echo x post", "echo s post", "echo d post"]


def test_a_prerequisite_plugin_receives_the_prerequisite_name_and_unknown_plugins_are_ignored():
    item = {"name": "s", "type": "script", "plugin": f"{PLUGINS}.cmd", "failurePolicy": "IGNORE", "a": 1}
    job = parse(text_of(a_job((("prerequisites", 2), item), ((*WORKER, "prerequisites"), ["s"]))))
    (call,) = calls_of(job, job.task_roles[0])
    assert (call.plugin, call.parameters, call.failure_is_ignored) == ("cmd", {"name": "s", "a": 1}, True)
    foreign = parse(
        text_of(a_job((("prerequisites", 2, "plugin"), "org.other"), ((*WORKER, "prerequisites"), ["s"])))
    )
    assert calls_of(foreign, foreign.task_roles[0]) == ()


def run(script, **environ):
    return subprocess.run(
        ["bash"],
        input=script,
        text=True,
        capture_output=True,
        timeout=DEADLINE_S,
        env={"PATH": os.environ["PATH"], **environ},
    )


@pytest.mark.parametrize(
    ("policy", "output", "code"), [("ignore", "a\nb\n", 0), ("fail", "a\n", 1), ("other", "a\n", 1)]
)
def test_a_failing_plugin_command_ends_the_script_unless_failures_are_ignored(policy, output, code):
    call = {
        "plugin": "cmd",
        "failurePolicy": policy,
        "parameters": {"preCommands": ["echo a", "false", "echo b"]},
    }
    ran = run(scripts(**with_plugins(call)).pre[0])
    assert (ran.stdout, ran.returncode) == (output, code)


def test_the_callbacks_of_the_cmd_plugin_run_before_and_after_the_task():
    call = {
        "plugin": "cmd",
        "parameters": {
            "callbacks": [
                {"event": "taskStarts", "commands": ["echo 1", True]},
                {"event": "containerStarts", "commands": ["echo never"]},
                {"event": "taskSucceeds", "commands": ["echo 3"]},
                {"event": "taskStarts", "commands": [4]},
            ]
        },
    }
    job = rendered(**with_plugins(call))
    assert job.roles[0].scripts.pre == ["#!/bin/bash\nset -o errexit\necho 1\ntrue\n4\n"]
    assert job.roles[0].scripts.post == ["#!/bin/bash\nset -o errexit\necho 3\n"]
    (warning,) = job.warnings
    assert warning.message.endswith('does nothing on event "containerStarts"; use taskStarts or taskSucceeds')


def test_the_git_plugin_clones_in_the_init_script_and_copies_in_the_pre_script(tmp_path):
    source = tmp_path / "source dir"
    source.mkdir()
    (source / "train.py").write_text("print(1)")
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True, timeout=DEADLINE_S)
    parameters = {"repo_uri": f"file://{source}", "options": ["--depth 1", "-q"], "clone_dir": "$HOME/code"}
    made = scripts(
        environment=TaskEnvironment(runtime_dir=str(tmp_path / "pai")),
        **with_plugins({"plugin": "git", "parameters": parameters}),
    )
    for script in (*made.init, *made.pre):
        ran = run(script, HOME=str(tmp_path / "home"))
        assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "home/code/train.py").read_text() == "print(1)"
    assert (tmp_path / "pai/code/.git").is_dir()


def test_a_git_option_with_an_unclosed_quote_is_refused():
    with pytest.raises(
        ProtocolInvalid, match=r"parameters\.options\[1\]: .* has a quote that is not closed; close it"
    ):
        scripts(
            **with_plugins({"plugin": "git", "parameters": {"repo_uri": "u", "options": ["-q", "-c 'a"]}})
        )


@pytest.mark.parametrize(("policy", "code"), [("ignore", 0), ("fail", 1)])
def test_a_failed_git_clone_fails_the_task_unless_failures_are_ignored(tmp_path, policy, code):
    fakes = tmp_path / "bin"
    fakes.mkdir()
    for name, line in (
        ("git", f"echo try >> {tmp_path}/tries; exit 128"),
        ("sleep", f"echo $1 >> {tmp_path}/waits"),
    ):
        (fakes / name).write_text(f"#!/bin/bash\n{line}\n")
        (fakes / name).chmod(0o755)
    call = {"plugin": "git", "failurePolicy": policy, "parameters": {"repo_uri": "u"}}
    ran = run(scripts(**with_plugins(call)).init[0], PATH=f"{fakes}:{os.environ['PATH']}")
    assert (ran.returncode, ran.stderr) == (code, "cannot clone; check repo_uri and the network\n")
    assert (tmp_path / "tries").read_text().count("try") == 10
    assert (tmp_path / "waits").read_text().split() == [
        "1",
        "2",
        "4",
        "8",
        "16",
        "32",
        "64",
        "128",
        "256",
        "300",
    ]


def test_tensorboard_starts_only_in_the_first_task_of_the_first_role(tmp_path):
    fake = tmp_path / "tensorboard"
    fake.write_text('#!/bin/bash\n[ "$1" = --version_tb ] && echo 2.4.1 || echo "$@"\n')
    fake.chmod(0o755)
    parameters = {"port": "<% $parameters.port %>", "logdir": {"a": "/x", "b": "/y"}}
    job = rendered(
        (("taskRoles", "later"), a_job()["taskRoles"]["worker"]),
        parameters={"port": 6006},
        **with_plugins({"plugin": "tensorboard", "parameters": parameters}),
    )
    first, later = job.roles
    assert later.scripts.pre == []
    path = f"{tmp_path}:{os.environ['PATH']}"
    (script,) = first.scripts.pre
    assert run(script, PATH=path, PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX="1").stdout == ""
    ran = run(script, PATH=path, PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX="0")
    assert ran.stdout == "--logdir_spec=a:/x,b:/y --port=6006 --bind_all\n"
    assert rendered(**with_plugins({"plugin": "tensorboard"})).roles[0].scripts.pre == []


def ssh(**parameters):
    return with_plugins({"plugin": "ssh", "parameters": parameters})


def test_the_ssh_plugin_without_keys_adds_no_script():
    assert scripts(**ssh()).pre == []
    assert scripts(**ssh(jobssh="no", sshbarrier=True)).pre == []
    assert scripts(**ssh(userssh={"type": "custom", "value": ""})).pre == []
    assert scripts(**ssh(userssh={"value": "k"})).pre == []
    assert (
        scripts(environment=TaskEnvironment(ssh_public_keys=("k",)), **ssh(userssh={"type": "none"})).pre
        == []
    )


def test_the_ssh_plugin_authorizes_the_keys_of_the_job_and_of_the_user_profile():
    environment = TaskEnvironment(ssh_public_keys=("profile's key",))
    (script,) = scripts(environment=environment, **ssh(userssh={"type": "custom", "value": "job key"})).pre
    assert "printf '%s\\n' 'profile'\"'\"'s key' >> \"$ssh_dir/authorized_keys\"" in script
    assert "printf '%s\\n' 'job key' >> \"$ssh_dir/authorized_keys\"" in script
    assert "job_key" not in script


def test_the_ssh_barrier_waits_for_the_configured_time():
    (plain,) = scripts(**ssh(jobssh=True)).pre
    (waiting,) = scripts(**ssh(jobssh="true", sshbarrier=True)).pre
    (shorter,) = scripts(
        parameters={"m": 2}, **ssh(jobssh=True, sshbarrier="True", sshbarrierTimeout="<% $parameters.m %>")
    ).pre
    assert "ConnectTimeout" not in plain
    assert "seq 0 1800" in waiting
    assert "seq 0 12" in shorter
    with pytest.raises(ProtocolInvalid, match=r'"soon" is not a number of minutes; write e\.g\. 30'):
        scripts(**ssh(jobssh=True, sshbarrier=True, sshbarrierTimeout="soon"))


def test_jobssh_without_gang_allocation_is_ignored_with_a_warning():
    call = {"plugin": "ssh", "parameters": {"jobssh": True}}
    job = rendered(**with_plugins(call, gangAllocation=False))
    assert job.roles[0].scripts.pre == []
    assert "ignores jobssh: without gangAllocation" in job.warnings[-1].message


def test_the_ssh_configuration_lists_all_tasks_of_the_job_as_hosts(tmp_path):
    """Run only the part of the script that needs neither root nor sshd."""
    (script,) = scripts(environment=TaskEnvironment(str(tmp_path)), **ssh(jobssh=True)).pre
    loop = script[script.index("for task in") : script.index('chmod 600 "$user_dir/config"')]
    (tmp_path / ".ssh").mkdir()
    variables = {
        "user_dir": f"{tmp_path}/.ssh",
        "ssh_dir": "/keys",
        "PAI_TASK_ROLE_INSTANCES": "ps:0,worker:1",
        "PAI_HOST_IP_ps_0": "10.0.0.1",
        "PAI_HOST_IP_worker_1": "10.0.0.2",
        "PAI_PORT_LIST_ps_0_ssh": "2200",
        "PAI_PORT_LIST_worker_1_ssh": "2201,2202",
    }
    assert run(loop, **variables).returncode == 0
    hosts = [line.split() for line in (tmp_path / ".ssh/config").read_text().splitlines()]
    assert [words[1] for words in hosts if words[0] in ("Host", "HostName", "Port")] == [
        *("ps-0", "10.0.0.1", "2200"),
        *("worker-1", "10.0.0.2", "2201"),
    ]


@pytest.mark.slow
def test_each_prerequisite_is_listed_once_and_before_its_dependants():
    requires = {"a": ["b", "c"], "b": ["d"], "c": ["d"]}
    assert in_order(["e", "a", "c", "e"], requires) == ("e", "d", "b", "c", "a")
    chain = {str(n): [str(n + 1)] for n in range(50_000)}
    assert len(in_order(["0"], chain)) == 50_001


@pytest.mark.parametrize(
    ("requires", "cycle"),
    [
        ({}, []),
        ({"a": ["b", "c"], "b": ["c"], "c": []}, []),
        ({"a": ["a"]}, ["a"]),
        ({"x": ["a"], "a": ["b", "c"], "b": [], "c": ["a"]}, ["a", "c"]),
        ({str(n): [str(n + 1), str(n + 2)] for n in range(300)}, []),
    ],
)
def test_a_cycle_of_prerequisites_is_detected(requires, cycle):
    assert cycle_in(requires) == cycle
