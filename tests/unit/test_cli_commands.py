"""nnictl's command line: help, versions, and one line for each error."""

import click
import pytest
from stored_experiments import CONFIG

from nni_manager.cli import main
from trial_keeper import __version__

pytestmark = pytest.mark.usefixtures("state_home")


def all_commands(group=main.cli, path=()):
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))


@pytest.mark.parametrize("command", [(), *all_commands()], ids=" ".join)
def test_the_help_of_every_command_has_an_example(nnictl, command):
    code, out, err = nnictl(*command, "--help")
    assert (code, err) == (0, "")
    assert "Example:\n" in out
    assert " ".join(["nnictl", *command]) in out.split("Example:\n")[1]


LISTS = [path for path in all_commands() if path[-1] in ("list", "ls", "jobs", "url")]


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_every_listing_command_has_a_json_option(nnictl, command):
    assert "--json" in nnictl(*command, "--help")[1]


def test_nnictl_and_the_keeper_have_the_same_version(nnictl):
    assert nnictl("--version") == (0, f"nnictl {__version__}\n", "")
    assert nnictl("-v") == (0, f"nnictl {__version__}\n", "")


def test_a_command_group_without_a_command_prints_help_to_stderr_and_exits_with_1(nnictl):
    code, out, err = nnictl("trial")
    assert (code, out) == (1, "")
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["creat"], "cannot find the command nnictl creat; did you mean create? `nnictl --help` shows"),
        (["trial", "list"], "cannot find the command nnictl trial list; "),
        (["create", "--confg", "x"], "cannot use option --confg of nnictl create; did you mean --config? "),
        (["create"], "cannot run nnictl create without an experiment file; write `nnictl create FILE`"),
        (["create", "-c", "x", "-p", "http"], "cannot use --port http: it is neither a number from 1 to 65534 nor auto; "),
        (["create", "-c", "x", "-p", "65535"], "cannot use --port 65535: it is neither a number from 1 to 65534"),
        (["trial", "ls", "a", "b"], "cannot read this command line: Got unexpected extra argument (b); "),
        (["trial", "ls", "--head", "1", "--tail", "1"], "cannot use --head and --tail together; leave one out"),
        (["trial", "ls", "--best", "1", "--tail", "1"], "cannot use --tail and --best together; leave one out"),
        (["trial", "ls", "--best", "1", "--sort", "time"], "cannot use --best and --sort together; leave one out"),
        (["trial", "ls", "--json", "--columns", "value"], "cannot use --json and --columns together; leave one out"),
        (["trial", "ls", "--nni-json", "--state", "failed"], "cannot use --nni-json and --state together; leave one out"),
        (["trial", "ls", "--descending"], "cannot use --descending without --sort; add --sort COLUMN"),
        (["stop", "abc", "--all"], "cannot use more than one of ID, --all and --port; "),
        (["stop", "--port", "8080"], "cannot find an experiment on port 8080; "),
        (["stop", "x*"], "cannot find a running experiment x*; "),
        (["create", "-c", "none.yml"], "cannot read none.yml: there is no such file; check the path"),
        (["create", "-c", "no/none.yml"], "cannot read no/none.yml: there is no such file; check the path"),
        (["stop"], "cannot find an experiment; start one with "),
        (["experiment", "delete"], "cannot delete: exactly one of ID and --all is needed; "),
        (["experiment", "delete", "x", "--all"], "cannot delete: exactly one of ID and --all is needed; "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_command_line_error_is_one_line_with_a_remedy(nnictl, arguments, expected):
    code, out, err = nnictl(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"ERROR: {expected}")
    assert err.count("\n") == 1


def test_all_errors_of_an_experiment_file_are_printed_one_per_line(nnictl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(
        CONFIG.replace("Concurrency: 2", "Concurrency: two") + "maxTrials: 3\n"
    )
    code, out, err = nnictl("create", "-c", "config.yml")
    assert (code, out) == (1, "")
    assert [line.split(": cannot")[0] for line in err.splitlines()] == [
        "ERROR: config.yml:3",
        "ERROR: config.yml:9",
    ]
    assert not (tmp_path / "nni-experiments").exists()


def test_commands_accept_the_experiment_file_as_argument_or_option(nnictl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = "ERROR: cannot read none.yml: there is no such file; check the path\n"
    for words in (
        ["create", "none.yml"],
        ["create", "--config", "none.yml"],
        ["platform", "clean", "none.yml"],
    ):
        assert nnictl(*words) == (1, "", missing)
    assert nnictl("create") == (
        1,
        "",
        "ERROR: cannot run nnictl create without an experiment file; write `nnictl create FILE`\n",
    )
    assert nnictl("create", "a.yml", "-c", "b.yml") == (
        1,
        "",
        "ERROR: cannot use both a.yml and --config b.yml; name one experiment file\n",
    )


def test_resume_and_view_accept_the_path_of_an_experiment(nnictl, tmp_path):
    for command in ("resume", "view"):
        code, _, err = nnictl(command, f"{tmp_path}/nothing")
        assert (code, f"cannot use {tmp_path}/nothing as an experiment: it has no folder db" in err) == (
            1,
            True,
        )
