"""`nnictl tag` and `nnictl note` write to the store of an experiment that has no running manager."""

import contextlib
import csv
import io
import json

import pytest
from made_experiment import made_experiment, write

from nni_manager.cli import main
from nni_manager.domain.remarks import Remarks
from nni_manager.errors import UserError
from nni_manager.experiment.queries import StartedExperiment
from nni_manager.store.folders import ManagerProcess
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry
from nni_manager.store.rows import remarks_row, trial_row
from nni_manager.store.writer import Store
from trial_keeper import __version__


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """The folder of an ended experiment with three trials."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = made_experiment(tmp_path, 3).folder
    Registry.of_user().add(folder)
    return folder


@pytest.fixture
def nnictl(capsys, ended):
    def run(*arguments):
        capsys.readouterr()
        code = main.run(arguments)
        return code, *capsys.readouterr()

    return run


def stored(folder, trial_id=None):
    with StoreReader(folder.database) as reader:
        return reader.remarks(trial_id)


def test_nnictl_trial_tag_adds_and_removes_and_prints_tags_and_stores_a_repeated_tag_once(nnictl, ended):
    for _ in range(2):
        code, out, err = nnictl("trial", "tag", "TEST", "-T", "00001", "--add", "keep", "--add", "lr/high")
        assert (code, out, err) == (0, "INFO: Trial 00001 has the tags keep, lr/high\n", "")
    assert nnictl("trial", "tag", "TEST", "-T", "00001", "--remove", "keep", "--remove", "none")[0] == 0
    assert nnictl("trial", "tag", "TEST", "-T", "00001")[1] == "INFO: Trial 00001 has the tags lr/high\n"
    assert nnictl("trial", "tag", "TEST", "-T", "00002")[1] == "INFO: Trial 00002 has no tags\n"
    assert stored(ended, "00001") == Remarks(("lr/high",), "")


@pytest.mark.parametrize("command", [("trial", "tag", "TEST", "-T", "00001"), ("experiment", "tag", "TEST")])
def test_tags_are_printed_as_a_json_list(nnictl, command):
    for changes, tags in (
        ((), []),
        (("--add", "keep", "--add", "lr/high"), ["keep", "lr/high"]),
        ((), ["keep", "lr/high"]),
    ):
        code, out, err = nnictl(*command, *changes, "--json")
        assert (code, json.loads(out), err) == (0, tags, "")


def test_a_note_can_be_set_and_printed_and_removed(nnictl, ended):
    text = "converges late\n  try \x1b[31mmore"
    assert (
        nnictl("trial", "note", "TEST", "-T", "00001", "--text", text)[1]
        == "INFO: Trial 00001: the note is stored\n"
    )
    assert nnictl("trial", "note", "TEST", "-T", "00001")[1] == "converges late\n  try \\x1b[31mmore\n"
    assert stored(ended, "00001").note == text
    assert (
        nnictl("trial", "note", "TEST", "-T", "00001", "--text", "")[1]
        == "INFO: Trial 00001: the note is removed\n"
    )
    code, out, err = nnictl("trial", "note", "TEST", "-T", "00001")
    assert (code, out, "Trial 00001 has no note" in err) == (0, "", True)


def test_nnictl_stores_tags_and_a_note_of_an_experiment_and_lists_experiments_by_tag(nnictl, ended):
    assert (
        nnictl("experiment", "tag", "TEST", "--add", "baseline")[1]
        == "INFO: Experiment TESTEXPT has the tags baseline\n"
    )
    assert nnictl("experiment", "note", "TEST", "--text", "the first")[0] == 0
    assert nnictl("experiment", "note", "TEST")[1] == "the first\n"
    assert stored(ended) == Remarks(("baseline",), "the first")
    (line,) = json.loads(nnictl("experiment", "list", "--all", "--json", "--tag", "baseline")[1])
    # `tag` repeats the value of `tags`, because NNI's clients read the field `tag`.
    assert (line["tags"], line["tag"], line["note"]) == (["baseline"], ["baseline"], "the first")
    assert nnictl("experiment", "list", "--all")[1].splitlines()[1].endswith("\tbaseline")
    out = nnictl("experiment", "list", "--all", "--tag", "baseline", "--tag", "other")[1]
    assert "There is no experiment with tags baseline, other" in out


def test_lists_and_exports_contain_tags_and_notes(nnictl, ended):
    write(
        ended,
        remarks_row("00001", Remarks(("keep", "v2"), "one\ntwo")),
        remarks_row("00002", Remarks(("keep",), "")),
    )
    lines = nnictl("trial", "ls", "TEST", "--tag", "keep", "--columns", "no.,tags,note")[1].splitlines()
    assert lines == ["no.\ttags\tnote", "1\tkeep v2\tone", "2\tkeep\t"]
    assert nnictl("trial", "ls", "TEST", "--sort", "tags")[1].splitlines()[-1].startswith("0\t")
    (one,) = json.loads(nnictl("trial", "ls", "TEST", "--tag", "keep", "--tag", "v2", "--json")[1])
    assert (one["id"], one["tags"], one["note"]) == ("00001", ["keep", "v2"], "one\ntwo")
    assert json.loads(nnictl("trial", "show", "TEST", "-T", "00001")[1])["note"] == "one\ntwo"
    of_nni, one, two = json.loads(nnictl("experiment", "export", "TEST")[1])
    assert (set(of_nni), one["tags"], one["note"]) == (
        {"trialJobId", "parameter", "value"},
        ["keep", "v2"],
        "one\ntwo",
    )
    assert ("note" in two, two["tags"]) == (False, ["keep"])
    for options in ([], ["--all"]):
        out = nnictl("experiment", "export", "TEST", "--type", "csv", *options)[1]
        rows = list(csv.DictReader(io.StringIO(out, newline="")))
        assert [(row["tags"], row["note"]) for row in rows] == [
            ("", ""),
            ("keep v2", "one\ntwo"),
            ("keep", ""),
        ]


def test_exports_and_lists_have_no_tag_column_if_no_trial_has_tags(nnictl):
    assert set(json.loads(nnictl("experiment", "export", "TEST")[1])[0]) == {
        "trialJobId",
        "parameter",
        "value",
    }
    assert "tags" not in nnictl("experiment", "export", "TEST", "--type", "csv")[1]
    assert nnictl("experiment", "list", "--all")[1].splitlines()[0].endswith("\tname")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("trial", "tag", "TEST", "-T", "00001", "--add", "a b"),
            "cannot use tag 'a b': a tag has 1 to 64 letters",
        ),
        (
            ("trial", "tag", "TEST", "-T", "nope", "--add", "a"),
            "cannot find trial 'nope' in experiment TESTEXPT",
        ),
        (
            ("trial", "tag", "TEST", "-T", "00001", "--add", "a", "--remove", "a"),
            "cannot both add and remove tag a",
        ),
        (("trial", "ls", "TEST", "--tag", "a b"), "cannot use tag 'a b'"),
        (("trial", "ls", "TEST", "--tag", "a", "--nni-json"), "cannot use --nni-json and --tag together"),
        (("experiment", "note", "TEST", "--text", "x" * 10_001), "the limit is 10000; shorten it"),
        (
            ("experiment", "tag", "TEST", *(f"--add=t{n}" for n in range(21))),
            "the limit is 20; remove some tags first",
        ),
    ],
)
def test_an_invalid_tag_or_note_is_refused_in_one_line_and_changes_nothing(nnictl, ended, arguments, says):
    code, out, err = nnictl(*arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert says in err
    assert (stored(ended), stored(ended, "00001")) == (Remarks(), Remarks())


@pytest.mark.parametrize(
    "arguments",
    [
        ("trial", "tag", "TEST", "-T", "00001", "--add", "keep"),
        ("experiment", "save", "TEST", "--path", "saved.tar.gz"),
    ],
)
def test_changing_tags_or_saving_the_experiment_keeps_the_process_file_of_the_last_manager(
    nnictl, ended, arguments, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    last = ManagerProcess(1, "127.0.0.1", 8080, __version__, "token", url_prefix="/lab")
    ended.write_process(last)
    assert nnictl(*arguments)[0] == 0
    assert ended.process() == last
    assert ended.running_process() is None
    assert nnictl("experiment", "list", "--all", "--json")[1].count('"managerIsRunning": false') == 1


@pytest.mark.slow
def test_the_python_api_changes_tags_and_notes_of_an_ended_experiment(ended):
    experiment = StartedExperiment("TESTEXPT")
    assert experiment.tag_trial("00001", "keep", "bad") == ["bad", "keep"]
    assert experiment.tag_trial("00001", remove="bad") == ["keep"]
    experiment.set_trial_note("00001", "late")
    assert experiment.tag("baseline", remove=["other"]) == ["baseline"]
    experiment.set_note("ours")
    trial = experiment.get_trial_job("00001")
    assert (trial.tags, trial.note, experiment.tags, experiment.note) == (
        ["keep"],
        "late",
        ["baseline"],
        "ours",
    )
    pytest.importorskip("pandas")
    frame = experiment.trials_dataframe()
    assert list(frame["tags"]) == [[], ["keep"], []]
    assert list(frame["note"]) == ["", "late", ""]


@pytest.mark.parametrize("trial_id", [None, 1, b"00001"])
def test_the_python_api_refuses_a_trial_id_that_is_not_text(ended, trial_id):
    experiment = StartedExperiment("TESTEXPT")
    message = f"^cannot find trial {trial_id!r} in experiment TESTEXPT; `nnictl trial ls"
    for call in (
        lambda: experiment.get_trial_job(trial_id),
        lambda: experiment.tag_trial(trial_id, "keep"),
        lambda: experiment.set_trial_note(trial_id, "late"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    assert (experiment.tags, experiment.note) == ([], "")


def test_a_later_manager_that_saves_a_trial_does_not_change_stored_tags(nnictl, ended):
    nnictl("trial", "tag", "TEST", "-T", "00001", "--add", "keep")
    # This store acts as the manager of a resumed experiment. A manager often writes the row of a trial, and must not change tags
    # and notes.
    with (
        StoreReader(ended.database) as reader,
        contextlib.closing(Store(ended.database, ended.collected_logs)) as store,
    ):
        store.commit([trial_row(reader.trial("00001"))], 1.0)
    assert stored(ended, "00001").tags == ("keep",)
