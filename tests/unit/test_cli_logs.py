"""nnictl log: which lines of a file it prints, and how it follows a growing file."""

import io
import shutil
import threading

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.cli import log_commands, main
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.registry import Registry
from nni_manager.store.rows import attempt_row, trial_row
from nni_manager.store.writer import Store
from trial_keeper.wire.messages import AttemptKey, Stream

CONFIG = """\
experimentName: digits
authorName: ada
trialConcurrency: 2
trainingServicePlatform: local
searchSpacePath: search_space.json
tuner: {builtinTunerName: Random}
trial: {command: "true", codeDir: .}
"""


@given(st.lists(st.sampled_from([b"\n", b"a", b"bc\n", b"\r"]), max_size=30).map(b"".join), st.integers(1, 8))
def test_the_last_lines_of_a_log_are_searched_backwards_from_the_end_of_the_file(text, count):
    file = io.BytesIO(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log_commands, "_BLOCK_BYTES", 3)
        log_commands._seek_last_lines(file, count)
    lines = io.BytesIO(text).readlines()
    assert file.readlines() == lines[-count:]


@pytest.fixture
def a_trial(tmp_path, monkeypatch):
    """A stored experiment with a running trial, and a function that saves the trial."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(CONFIG)
    folder = ExperimentFolder(tmp_path / "logs" / "abc11111")
    folder.make()
    config = read_experiment_file(tmp_path / "config.yml").to_json()
    store = Store.create(folder.database, folder.collected_logs, "abc11111", config, b"s", 0.0)
    Registry.of_user().add(folder)
    trial = Trial("aB3dE", 0, {}, {}, 1.0, "aB3dE", TrialState.RUNNING)

    def save(state, started_at_s=None):
        trial.state, trial.run.started_at_s = state, started_at_s
        keys = [AttemptKey("aB3dE", attempt_id(number), "main-0") for number in range(3)]
        store.commit([trial_row(trial), *(attempt_row(key, int(key.attempt_id)) for key in keys)], 1.0)

    save(TrialState.RUNNING)
    yield folder, save
    store.close()


def written(folder, text, attempt=0, stream=Stream.STDOUT):
    path = folder.workspace.attempt(AttemptKey("aB3dE", attempt_id(attempt), "main-0")).stream(stream)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ([], "1\n2\n3\n"),
        (["--head", "2"], "1\n2\n"),
        (["-H", "9"], "1\n2\n3\n"),
        (["--tail", "1"], "3\n"),
    ],
)
def test_the_options_head_and_tail_print_only_a_part_of_the_log(a_trial, capsys, options, output):
    written(a_trial[0], "1\n2\n3\n")
    assert main.run(["log", "trial", "abc", "-T", "aB3", *options]) == 0
    assert capsys.readouterr() == (output, "")


@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_nnictl_log_prints_stdout_that_the_nni_package_redirected_to_the_keeper_log(a_trial, capsys, options):
    folder, save = a_trial
    printed = "[2026-01-02 03:04:05] PRINT hello\n"
    written(folder, "")
    written(folder, f"keeper's line\n{printed}", stream=Stream.KEEPER)
    save(TrialState.SUCCEEDED)
    assert main.run(["log", "trial", "abc", "-T", "aB3", *options]) == 0
    out, err = capsys.readouterr()
    assert out == f"keeper's line\n{printed}"
    assert err.startswith("WARNING: stdout of trial aB3dE is empty: NNI's package has redirected it to ")
    assert main.run(["log", "trial", "abc", "-T", "aB3", "--tail", "1"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("stdout", ["", "one\n"])
def test_the_log_command_does_not_print_the_keeper_log_as_stdout(a_trial, capsys, stdout):
    folder, _ = a_trial
    written(folder, stdout)
    of_nni = "[2026-01-02 03:04:05] PRINT hello\n"
    written(folder, f"keeper's line\n{of_nni if stdout else ''}", stream=Stream.KEEPER)
    assert main.run(["log", "trial", "abc", "-T", "aB3"]) == 0
    nothing = "WARNING: trial aB3dE has written nothing to stdout and stderr; `--stream trial.log` shows its keeper's log\n"
    assert capsys.readouterr() == (stdout, "" if stdout else nothing)


def test_stdout_and_stderr_are_printed_in_order_with_headings_if_neither_is_empty(a_trial, capsys):
    folder, _ = a_trial
    written(folder, "epoch 1\nepoch 2\n")
    written(folder, "", stream=Stream.STDERR)
    assert main.run(["log", "trial", "abc", "-T", "aB3"]) == 0
    assert capsys.readouterr() == ("epoch 1\nepoch 2\n", "")
    written(folder, "warning\nKeyError: 'lr'\n", stream=Stream.STDERR)
    assert main.run(["log", "trial", "abc", "-T", "aB3", "--tail", "1"]) == 0
    assert capsys.readouterr() == ("==> stdout <==\nepoch 2\n==> stderr <==\nKeyError: 'lr'\n", "")
    assert main.run(["log", "trial", "abc", "-T", "aB3", "--stream", "stderr"]) == 0
    assert capsys.readouterr() == ("warning\nKeyError: 'lr'\n", "")
    assert main.run(["log", "trial", "abc", "-T", "aB3", "--path"]) == 0
    assert capsys.readouterr().out.endswith("/output/stdout\n")


def test_stderr_is_printed_without_a_heading_if_stdout_is_empty(a_trial, capsys):
    folder, _ = a_trial
    written(folder, "")
    written(folder, "KeyError: 'lr'\n", stream=Stream.STDERR)
    assert main.run(["log", "trial", "abc", "-T", "aB3"]) == 0
    assert capsys.readouterr() == ("KeyError: 'lr'\n", "")


@pytest.mark.parametrize("other", ["--tail", "--follow"])
def test_the_option_head_cannot_be_combined_with_tail_or_follow(a_trial, capsys, other):
    words = [other, "1"] if other == "--tail" else [other]
    assert main.run(["log", "trial", "abc", "-T", "aB3dE", "--head", "1", *words]) == 1
    assert capsys.readouterr().err == f"ERROR: cannot use --head and {other} together; leave one out\n"


def test_nnictl_log_with_follow_prints_the_output_of_all_attempts_until_the_trial_ends(
    a_trial, capsys, monkeypatch
):
    folder, save = a_trial
    # nnictl sleeps after every poll. Instead of each sleep, the test runs the next of these steps.
    steps = iter(
        [
            lambda: written(folder, "one\n"),
            lambda: (written(folder, "two"), written(folder, "to stderr\n", stream=Stream.STDERR)),
            lambda: written(folder, "anew\n", attempt=1),
            lambda: (written(folder, "the last\n", attempt=1), save(TrialState.SUCCEEDED)),
        ]
    )
    monkeypatch.setattr(log_commands.time, "sleep", lambda _: next(steps)())
    assert main.run(["log", "trial", "abc", "-T", "aB3dE", "--follow"]) == 0
    assert capsys.readouterr() == (
        "one\ntwoto stderr\nanew\nthe last\n",
        "WARNING: trial aB3dE: stdout continues with attempt 1 (main-0)\n",
    )
    assert list(steps) == []


def test_the_managers_log_is_followed_until_an_interrupt(a_trial, capsys, monkeypatch):
    folder, _ = a_trial
    folder.manager_stdout.write_text("1\n2\n")

    def more(_):
        if not folder.manager_stdout.read_text().endswith("3\n"):
            folder.manager_stdout.write_text("1\n2\n3\n")
            return
        raise KeyboardInterrupt

    monkeypatch.setattr(log_commands.time, "sleep", more)
    assert main.run(["log", "stdout", "abc", "--tail", "1", "--follow"]) == main.INTERRUPTED
    assert capsys.readouterr() == (
        "2\n3\n",
        # The terminal shows ^C without a line end, so nnictl prints a newline.
        "\n",
    )


@pytest.mark.parametrize("removed", ["trials", "trials/aB3dE"])
def test_nnictl_log_reports_that_the_files_of_a_trial_were_removed(a_trial, capsys, removed):
    folder, save = a_trial
    written(folder, "one\n")
    save(TrialState.SUCCEEDED, started_at_s=1.0)
    shutil.rmtree(folder.workspace.root / removed)
    assert main.run(["log", "trial", "abc", "-T", "aB3dE"]) == 1
    workspace, collected = folder.workspace.trial("aB3dE").path, folder.collected_logs / "aB3dE"
    assert (
        f"its files are gone, neither {workspace} nor {collected} has them; restore"
        in capsys.readouterr().err
    )


def test_nnictl_log_with_follow_ends_when_the_trial_ends_without_output(a_trial, capsys, monkeypatch):
    _, save = a_trial
    polled = threading.Event()

    def end(_):
        assert not polled.is_set()
        polled.set()
        save(TrialState.FAILED)

    monkeypatch.setattr(log_commands.time, "sleep", end)
    assert main.run(["log", "trial", "abc", "-T", "aB3dE", "--follow"]) == 1
    assert "has written nothing" in capsys.readouterr().err
