"""Folders of annotated code: the search space, the copy with chosen values, and the experiment file."""

import os
import re
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.client.manager_process import create_experiment
from nni_manager.config import code_folder
from nni_manager.config.annotated_code import CodeNotCopied, files_with_values, read_code, write_copy
from nni_manager.config.code_folder import CodeUnusable
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.reader import read_experiment_file

CONFIG = """\
authorName: ada
experimentName: annotated
trialConcurrency: 1
trainingServicePlatform: local
logDir: experiments
useAnnotation: true
tuner: {builtinTunerName: Random}
trial: {command: python3 train.py, codeDir: .}
"""
V2 = """\
searchSpaceFile: none.json
trialCommand: python3 train.py
trialCodeDirectory: .
trialConcurrency: 1
useAnnotation: true
tuner: {name: Random}
experimentWorkingDirectory: experiments
trainingService: {platform: local}
"""
SIZE = "'''@nni.variable(nni.choice(16, 32), name=size)'''\nsize = 8\n"
REPORT = "'''@nni.report_final_result(1)'''\n"


@pytest.fixture
def code(tmp_path):
    """An empty code folder."""
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)


def read(code, *excluded):
    return read_code(code, code, excluded)


def copied(code, *excluded):
    """The copy of a code folder, and the folder of its annotated files."""
    made, annotated = code.parent / "copy", code.parent / "annotated"
    found = read(code, *excluded)
    assert found.diagnostics == ()
    write_copy(found, made, annotated)
    return made, annotated


def paths(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_search_space_key_starts_with_the_dotted_path_of_its_file(code):
    write(
        code, train_dot_py=SIZE, net__layers____init___dot_py=SIZE, net__conv_dot_py=SIZE, other_dot_txt=SIZE
    )
    write(code, net__layers____init___dot_py=REPORT)
    found = read(code)
    assert sorted(found.space) == ["net.conv/size/choice", "train/size/choice"]
    assert "net/conv.py" in found.generated
    assert "other.txt" not in found.generated


def test_it_is_an_error_if_two_files_define_the_same_search_space_key_with_different_values(code):
    write(code, **{"a.b_dot_py": SIZE, "a__b_dot_py": SIZE.replace("32", "64")})
    (error,) = read(code).diagnostics
    assert re.search(r"a\.b\.py: cannot use a\.b/size/choice: a/b\.py gives this key other values, and both files are "
    r"the module a\.b; "
                     "rename one of the files", str(error))  # fmt: skip


def test_the_copied_code_can_be_filled_with_values_and_the_original_code_is_unchanged(code):
    write(
        code,
        train_dot_py=SIZE,
        run_dot_sh="echo",
        net__train_dot_py=REPORT,
        net__data_dot_bin=b"\0\xff\r\n",
        net__py="x",
    )
    (code / "run.sh").chmod(0o755)
    (code / "empty").mkdir()
    for name in ("run.sh", "train.py"):
        os.utime(code / name, (1, 1))
    before = {path: path.read_bytes() for path in code.rglob("*") if path.is_file()}
    made, annotated = copied(code)
    assert {path: path.read_bytes() for path in code.rglob("*") if path.is_file()} == before
    assert paths(made) == paths(code)
    assert stat.S_IMODE((made / "run.sh").stat().st_mode) == 0o755
    assert (made / "run.sh").stat().st_mtime == 1
    assert (made / "net/data.bin").read_bytes() == b"\0\xff\r\n"
    assert b"_nni.parameter('train/size/choice')" in (made / "train.py").read_bytes()
    # A changed file must not keep the mtime of the original file: otherwise Python may use bytecode of the original file.
    assert (made / "train.py").stat().st_mtime > 1
    assert paths(annotated) == ["net", "net/train.py", "train.py"]
    assert files_with_values(annotated, {"train/size/choice": 32}) == {
        "net/train.py": REPORT.encode(),
        "train.py": SIZE.replace("size = 8", "size = 32").encode(),
    }


def test_the_copied_code_omits_ignored_files_pipes_and_experiment_folders(code):
    write(
        code,
        _dot_nniignore="data/\nbroken.py\n",
        data__big="x",
        broken_dot_py="'@nni.what()",
        train_dot_py=SIZE,
    )
    write(code, experiments__old__code__train_dot_py="'@nni.what()'")
    os.mkfifo(code / "pipe")
    made, _ = copied(code, code / "experiments")
    assert paths(made) == [".nniignore", "train.py"]


def test_copied_links_keep_their_targets_unless_the_target_is_an_annotated_file_outside_the_code_folder(
    code, tmp_path
):
    write(tmp_path, data__big="x", shared_dot_py=SIZE)
    write(code, train_dot_py=SIZE)
    (code / "data").symlink_to("../data")
    (code / "gone").symlink_to("../gone")
    (code / "same.py").symlink_to("train.py")
    (code / "shared.py").symlink_to("../shared.py")
    made, annotated = copied(code)
    assert os.readlink(made / "data") == str(tmp_path / "data")
    assert os.readlink(made / "gone") == str(tmp_path / "gone")
    assert os.readlink(made / "same.py") == "train.py"
    assert not (made / "shared.py").is_symlink()
    assert b"_nni.parameter('shared/size/choice')" in (made / "shared.py").read_bytes()
    assert paths(annotated) == ["shared.py", "train.py"]


def test_a_file_with_a_secret_is_not_copied(code):
    write(code, train_dot_py=SIZE, config_dot_yml="token: x")
    found = read_code(code, code, (), (code / "config.yml",))
    assert [entry.path for entry in found.entries] == ["train.py"]


@given(
    st.dictionaries(st.sampled_from(["a.py", "b/c.py", "d.txt", "e.PY"]), st.binary(max_size=50), min_size=1)
)
def test_files_without_annotations_are_copied_byte_for_byte(tmp_path_factory, files):
    code = tmp_path_factory.mktemp("bytes") / "code"
    for name, content in files.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_bytes(content)
    made, annotated = copied(code)
    assert {
        path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()
    } == files
    assert paths(annotated) == []


def test_a_code_folder_with_too_many_files_is_rejected(code, monkeypatch):
    monkeypatch.setattr(code_folder, "_MAX_ENTRIES", 5)
    write(code, **{f"{number}_dot_py": SIZE for number in range(9)})
    with pytest.raises(
        CodeUnusable, match=r"cannot copy codeDir .*: it has more than 5 files and folders; list those that"
    ):
        read(code)


def test_a_file_that_vanishes_during_the_copy_is_reported(code):
    write(code, train_dot_py=SIZE, data_dot_txt="x")
    found = read(code)
    (code / "data.txt").unlink()
    expected = (
        r"cannot copy codeDir to .*/copy: .*data\.txt: No such file or directory; free some space in logDir,"
    )
    with pytest.raises(CodeNotCopied, match=expected):
        write_copy(found, code.parent / "copy", code.parent / "annotated")


# ---- the experiment file


@pytest.fixture
def config(code, monkeypatch):
    """Return a function that reads an experiment file with the given replacements. The code folder is the current directory."""
    monkeypatch.chdir(code)

    def config_of(replace=(), text=CONFIG):
        for old, new in dict(replace).items():
            assert old in text
            text = text.replace(old, new)
        write(code, config_dot_yml=text)
        return read_experiment_file(code_folder.Path("config.yml"))

    return config_of


def lines_of(caught):
    return str(caught.value).splitlines()


def test_annotations_define_the_search_space(code, config):
    write(code, train_dot_py=SIZE)
    read = config()
    assert read.search_space_raw == {"train/size/choice": {"_type": "choice", "_value": [16, 32]}}
    assert (read.is_annotated, read.warnings) == (True, ())


def test_annotations_override_the_search_space_file_with_a_warning(code, config):
    write(code, train_dot_py=SIZE)
    space = "searchSpacePath: none.json\nlogDir"
    expected = (
        "useAnnotation: true takes precedence over {}: the search space is that of the annotations in {}"
    )
    assert config({"logDir": space}).warnings == (expected.format("searchSpacePath", "trial.codeDir"),)
    assert config(text=V2).warnings == (expected.format("searchSpaceFile", "trialCodeDirectory"),)
    here = {"searchSpaceFile: none.json": "searchSpace: {lr: {_type: what}}"}
    assert config(here, V2).warnings == (expected.format("searchSpace", "trialCodeDirectory"),)


def test_the_search_space_file_applies_if_no_annotation_declares_a_hyper_parameter(code, config):
    write(code, train_dot_py=REPORT, space_dot_json='{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    read = config({"logDir": "searchSpacePath: space.json\nlogDir"})
    assert list(read.search_space_raw) == ["lr"]
    assert read.is_annotated  # true, because the code has an annotation that reports a result
    assert read.warnings == (
        "useAnnotation: true has no effect, because no annotation declares a hyper-parameter: searchSpacePath is the "
        "search space",
    )
    write(code, train_dot_py="import nni_sdk")
    assert not config({"logDir": "searchSpacePath: space.json\nlogDir"}).is_annotated


def test_one_error_is_reported_if_annotated_code_declares_no_hyper_parameter(code, config):
    write(code, train_dot_py=REPORT)
    with pytest.raises(ConfigInvalid) as caught:
        config()
    (line,) = lines_of(caught)
    assert line.startswith(
        f"config.yml:6: cannot use useAnnotation: true: no annotation in {code} declares a hyper-parameter; write "
        f"'''@nni.variable("
    )


def test_errors_of_the_experiment_file_and_of_the_code_are_reported_together(code, config):
    write(
        code,
        train_dot_py="x = 1\n'''@nni.foo()'''\n",
        b_dot_py="\n'''@nni.report_final_result()'''\n",
        a_dot_py=REPORT + SIZE[:50],
    )
    with pytest.raises(ConfigInvalid) as caught:
        config({"trialConcurrency: 1": "trialConcurrency: 0"})
    assert [line.split(": cannot")[0] for line in lines_of(caught)] == [
        "config.yml:3",
        "a.py:2",
        "b.py:2",
        "train.py:2",
    ]


def test_an_error_contains_the_path_of_its_file_relative_to_the_current_directory(code, config, monkeypatch):
    write(code, train_dot_py="'''@nni.foo()'''\n")
    monkeypatch.chdir(code.parent)
    (code / "config.yml").write_text(CONFIG)
    with pytest.raises(ConfigInvalid, match=r"^code/train\.py:1: cannot use @nni\.foo"):
        read_experiment_file(code_folder.Path("code/config.yml"))


def test_an_invalid_nniignore_line_is_reported_at_the_code_dir_key_of_the_experiment_file(code, config):
    write(code, train_dot_py=SIZE, _dot_nniignore="x\n\\\n")
    with pytest.raises(ConfigInvalid, match=r"^config\.yml:8: cannot use .*\.nniignore: line 2"):
        config()


def test_the_experiments_folder_may_be_inside_the_code_folder_but_may_not_be_the_code_folder(code, config):
    write(code, train_dot_py=SIZE)
    assert config().log_dir == code / "experiments"
    with pytest.raises(
        ConfigInvalid,
        match=r"config\.yml:5: cannot use logDir: .* is also trial\.codeDir, which each experiment",
    ):
        config({"logDir: experiments": "logDir: ."})


def test_a_trial_command_that_runs_the_original_code_causes_a_warning(code, config):
    write(code, train_dot_py=SIZE)
    (warning,) = config({"python3 train.py": f"python3 {code}/train.py"}).warnings
    assert warning.startswith(
        f"trial.command contains {code}, so trials may run the original code, without chosen values; write"
    )


def test_the_config_reader_skips_the_code_folder_if_the_caller_does_not_request_the_code(code, config):
    write(code, train_dot_py=SIZE)
    config()
    write(code, train_dot_py="'''@nni.foo()'''\n")
    read = read_experiment_file(code_folder.Path("config.yml"), reads_code=False)
    assert (read.search_space_raw, read.is_annotated) == ({}, False)


def test_the_creation_of_an_experiment_fails_and_leaves_no_files_if_annotations_change_after_the_check(
    code, config, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(code.parent / "state"))
    write(code, train_dot_py=SIZE)
    read = config()
    write(code, train_dot_py=SIZE.replace("32", "64"))
    with pytest.raises(
        CodeNotCopied, match="its annotations changed after they were checked; run the command again"
    ):
        create_experiment(read, [], debug=False)
    write(code, train_dot_py="'''@nni.foo()'''\n")
    with pytest.raises(ConfigInvalid, match=r"train\.py:1: cannot use @nni\.foo"):
        create_experiment(read, [], debug=False)
    assert not (code / "experiments").exists()
