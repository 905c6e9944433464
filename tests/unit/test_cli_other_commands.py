"""nnictl's other commands: webui, platform, algo, tensorboard, and shell completion."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from attempts import attempt_id
from deadlines import DEADLINE_S
from made_experiment import served_view

from nni_manager.cli import main
from nni_manager.client import links, tensorboards
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.store.registry import Registry
from nni_manager.store.rows import experiment_row, trial_row
from nni_manager.store.writer import Store
from trial_keeper import __version__
from trial_keeper.wire.messages import AttemptKey

ROOT = Path(__file__).parents[2]
CONFIG = """\
experimentName: dïgits
authorName: ada
trialConcurrency: 2
trainingServicePlatform: local
searchSpacePath: search_space.json
tuner: {builtinTunerName: Random}
trial: {command: "true", codeDir: .}
"""
PAI = (
    CONFIG.replace("local", "pai").replace('{command: "true", codeDir: .}', "")
    + """\
  command: "true"
  codeDir: .
  image: i
  gpuNum: 0
  cpuNum: 1
  memoryMB: 100
  nniManagerNFSMountPath: STORAGE
  containerNFSMountPath: /mnt/data
  paiStorageConfigName: data
paiConfig: {userName: ada, host: local}
"""
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(CONFIG)
    (tmp_path / "pai.yml").write_text(PAI.replace("STORAGE", str(tmp_path / "storage")))
    (tmp_path / "storage").mkdir()
    return tmp_path


@pytest.fixture
def nnictl(capsys):
    def run(*arguments):
        code = main.run(arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def an_experiment(home):
    """Creates a stored experiment with two trials. If a manager is given, the test process owns the experiment until the test
    ends.
    """
    with contextlib.ExitStack() as stack:

        def make(experiment_id, manager=None, state=ExperimentState.DONE, storage=None):
            config = read_experiment_file(home / "config.yml").to_json()
            folder = ExperimentFolder(home / "logs" / experiment_id)
            folder.make(storage)
            store = Store.create(folder.database, folder.collected_logs, experiment_id, config, b"s", 0.0)
            trials = [
                Trial(name, n, {}, {}, 1.0, name, TrialState.SUCCEEDED)
                for n, name in enumerate(("aB3dE", "xY9zW"))
            ]
            store.commit([*map(trial_row, trials), experiment_row(state, "", 1.0, 2.0, True)], 1.0)
            store.close()
            Registry.of_user().add(folder)
            if manager is not None:
                stack.enter_context(folder.owned())
                folder.write_process(manager)
            return folder

        yield make


def a_manager(host="127.0.0.1", port=9000, **more):
    return ManagerProcess(os.getpid(), host, port, __version__, "the-token", **more)


# ---- output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "environ"), [("{} >&-", {}), ("{} 2>&-", {}), ("{}", {"PYTHONIOENCODING": "ascii"})]
)
def test_nnictl_prints_no_traceback_if_an_output_stream_is_closed_or_can_only_encode_ascii(
    an_experiment, command, environ
):
    an_experiment("abc11111")
    nnictl = f"{sys.executable} -c 'from nni_manager.cli.main import main; main()' experiment list --all"
    done = subprocess.run(
        ["bash", "-c", command.format(nnictl)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("abc11111" in done.stdout) is (command != "{} >&-")
    assert ("d\\xefgits" in done.stdout) is bool(environ)


def test_experiment_save_requires_an_existing_folder(nnictl, an_experiment, tmp_path):
    an_experiment("abc11111")
    code, _, err = nnictl("experiment", "save", "abc11111", "--path", str(tmp_path / "none" / "a.tar.gz"))
    assert (code, err) == (
        1,
        f"ERROR: cannot write {tmp_path}/none/a.tar.gz: there is no folder {tmp_path}/none; create it, or name another\n",
    )


# ---- the first steps


STEPS = ["create", "top", "trial ls", "log trial", "stop", "webui url", "resume"]


def test_nnictl_without_arguments_prints_the_first_steps_in_80_columns(nnictl):
    code, out, err = nnictl()
    assert (code, err) == (0, "")
    printed = [line.split() for line in out.splitlines() if line.startswith("  nnictl ")]
    assert [
        " ".join(words[1 : 1 + len(step.split())]) for words, step in zip(printed, STEPS, strict=True)
    ] == STEPS
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", STEPS)
def test_every_command_in_the_first_steps_exists(nnictl, command):
    code, out, _ = nnictl(*command.split(), "--help")
    assert (code, out.startswith("Usage: nnictl")) == (0, True)


# ---- webui


@pytest.fixture
def viewed(an_experiment):
    """An experiment that nnictl view serves."""
    folder = an_experiment("abc11111")
    with folder.viewed(), served_view(folder) as served:
        folder.write_process(served.process, is_view=True)
        yield served


def test_webui_url_prints_a_login_link_and_no_token(nnictl, viewed):
    code, out, err = nnictl("webui", "url", "abc")
    assert (code, err) == (0, "")
    origin, _, secret = out.rstrip("\n").partition("/enter#")
    assert origin == viewed.origin
    assert viewed.session_auth.begin(secret) is not None
    assert viewed.session_auth.token not in out


def test_webui_url_prints_the_token_file_and_the_lifetime_of_the_link_as_json(nnictl, viewed):
    document = json.loads(nnictl("webui", "url", "abc", "--json")[1])
    assert (document["urls"], document["expiresInS"]) == ([viewed.origin], 600)
    assert viewed.session_auth.begin(document["links"][0].partition("#")[2]) is not None
    assert document["tokenFile"] == f"{viewed.folder.path}/view-process.json"
    assert viewed.session_auth.token not in str(document)


def test_webui_url_prints_no_link_if_the_manager_does_not_answer(nnictl, an_experiment):
    an_experiment("abc11111", a_manager(port=1))
    code, out, err = nnictl("webui", "url")
    assert (code, out) == (1, "")
    assert err.startswith("ERROR: cannot reach the manager of experiment abc11111 at http://127.0.0.1:1/")


def test_webui_url_prints_a_url_for_every_address_of_the_manager():
    urls = list(links.urls_of(a_manager("0.0.0.0", certificate_sha256="AB:CD")))
    assert "https://127.0.0.1:9000" in urls
    assert not any("0.0.0.0" in url for url in urls)
    assert list(links.urls_of(a_manager("::1"))) == ["http://[::1]:9000"]


def test_webui_url_fails_for_an_experiment_that_is_not_served(nnictl, an_experiment):
    an_experiment("abc11111")
    code, out, err = nnictl("webui", "url", "abc")
    assert (code, out) == (1, "")
    assert err.endswith("it is not running; `nnictl view abc11111` serves its stored data\n")


# ---- platform


def make_trial_files(storage, experiment_id):
    root = storage / experiment_id
    (root / "trials/aB3dE/attempts").mkdir(parents=True, exist_ok=True)
    (root / "trials/aB3dE/attempts/link").symlink_to(storage.parent)
    (root / "code-1234.tar.gz").write_bytes(b"code")
    (root / "manager.json").write_text("{}")
    return root


def test_platform_clean_removes_only_files_of_ended_experiments(nnictl, an_experiment, home):
    storage = home / "storage"
    done = an_experiment("done1111", storage=storage)
    an_experiment("runs1111", a_manager(), storage=storage)
    an_experiment("died1111", state=ExperimentState.RUNNING, storage=storage)
    # The experiment else1111 is on another storage, so nnictl must keep the folder of the same name on this storage.
    an_experiment("else1111", storage=home)
    roots = {
        name: make_trial_files(storage, name)
        for name in ("done1111", "runs1111", "died1111", "else1111", "alien111")
    }
    (storage / "data").mkdir()
    (storage / "linked").symlink_to(roots["done1111"])
    before = sorted(path for path in storage.rglob("*") if "done1111" not in path.parts)
    code, out, err = nnictl("platform", "clean", "-c", str(home / "pai.yml"), "--yes")
    assert (code, out) == (0, f"INFO: Removed 2 folders and files from {roots['done1111']}\n")
    assert [line.split(" is kept: ")[0] for line in err.splitlines()] == [
        f"WARNING: {roots[name]}" for name in ("alien111", "died1111", "else1111", "runs1111")
    ]
    assert sorted(path.name for path in roots["done1111"].rglob("*")) == ["manager.json", "trials"]
    assert sorted(path for path in storage.rglob("*") if "done1111" not in path.parts) == before
    assert done.database.is_file()
    assert "There is nothing to clean" in nnictl("platform", "clean", "-c", str(home / "pai.yml"))[1]


def test_platform_clean_accepts_a_kubernetes_volume_claim(nnictl, an_experiment, home):
    an_experiment("done1111", storage=home / "storage")
    root = make_trial_files(home / "storage", "done1111")
    (home / "fc.yml").write_text(
        CONFIG.replace("local", "frameworkcontroller").partition("trial:")[0]
        + "trial:\n  codeDir: .\n  taskRoles:\n"
        + "  - {name: w, taskNum: 1, command: 'true', gpuNum: 0, cpuNum: 1, memoryMB: 100, image: i,\n"
        + "     frameworkAttemptCompletionPolicy: {minFailedTaskCount: 1, minSucceededTaskCount: 1}}\n"
        + f"frameworkcontrollerConfig: {{storage: pvc, pvc: {{path: {home}/storage, name: nni}}}}\n"
    )
    code, out, err = nnictl("platform", "clean", "-c", str(home / "fc.yml"), "--yes")
    assert (code, out, err) == (0, f"INFO: Removed 2 folders and files from {root}\n", "")


def test_platform_clean_requires_a_confirmation(nnictl, an_experiment, home):
    an_experiment("done1111", storage=home / "storage")
    root = make_trial_files(home / "storage", "done1111")
    code, _, err = nnictl("platform", "clean", "-c", str(home / "pai.yml"))
    assert (code, "confirm with --yes" in err, (root / "code-1234.tar.gz").exists()) == (1, True, True)


def test_platform_clean_removes_no_files_on_the_local_platform(nnictl, home):
    code, out, _ = nnictl("platform", "clean", "-c", str(home / "config.yml"))
    assert (code, "`nnictl experiment delete ID` removes one" in out) == (0, True)


# ---- algo


def test_a_custom_algorithm_is_listed_until_it_is_unregistered(nnictl, home):
    (home / "demo.py").write_text("class Demo: ...\n")
    (home / "demo.yml").write_text(
        "algoType: tuner\nbuiltinName: demotuner\nclassName: demo.Demo\ncodeDirectory: .\n"
    )
    code, out, err = nnictl("algo", "register", "--meta", str(home / "demo.yml"))
    assert (code, out, err) == (0, "INFO: Registered tuner demotuner (demo.Demo)\n", "")
    assert (
        "tuner     demotuner                registered  demo.Demo" in nnictl("algo", "list")[1].splitlines()
    )
    assert json.loads(nnictl("algo", "show", "demotuner")[1]) == {
        "kind": "tuner",
        "name": "demotuner",
        "source": "registered",
        "className": "demo.Demo",
        "codeDirectory": str(home),
    }
    assert nnictl("algo", "register", "-m", str(home / "demo.yml"))[2].startswith(
        "ERROR: cannot register tuner "
    )
    assert nnictl("algo", "unregister", "demotuner")[1] == "INFO: Unregistered tuner demotuner\n"
    assert "demotuner" not in nnictl("algo", "list")[1]
    assert nnictl("algo", "show", "demotuner")[0] == 1


@pytest.mark.parametrize(
    ("code", "lines", "message"),
    [
        (
            "",
            "className: demo.Demo\ncodeDirectory: .",
            "demo.Demo cannot be imported from {home} (AttributeError: ",
        ),
        ("class Demo: ...", "className: demo.Demo", "as codeDirectory in demo.yml"),
        (
            "class Demo: ...",
            "className: demo.Demo\nclassArgsValidator: demo.Checks\ncodeDirectory: .",
            "demo.Checks cannot be imported",
        ),
    ],
    ids=["no such class", "no folder", "no such validator"],
)
def test_a_custom_algorithm_whose_class_cannot_be_imported_is_not_registered(
    nnictl, home, monkeypatch, code, lines, message
):
    (home / "demo.py").write_text(f"{code}\n")
    (home / "demo.yml").write_text(f"algoType: tuner\nbuiltinName: demotuner\n{lines}\n")
    monkeypatch.chdir(home)
    done, out, err = nnictl("algo", "register", "--meta", "demo.yml")
    assert (done, out) == (1, "")
    assert err.startswith("ERROR: cannot register tuner 'demotuner': demo.")
    assert message.format(home=home) in err
    assert "demotuner" not in nnictl("algo", "list")[1]


def test_the_arguments_of_a_built_in_algorithm_are_shown(nnictl):
    shown = json.loads(nnictl("algo", "show", "TPE")[1])
    assert json.loads(nnictl("algo", "show", "tpe")[1]) == shown
    assert shown["classArgs"]["optimize_mode"]["default"] == "minimize"
    names = {(row["kind"], row["name"]) for row in json.loads(nnictl("algo", "list", "--json")[1])}
    assert {("tuner", "TPE"), ("advisor", "Hyperband"), ("assessor", "Medianstop")} <= names
    assert json.loads(nnictl("algo", "show", "Hyperband")[1])["classArgs"]["eta"]["default"] == 3


# ---- tensorboard

# PROGRAM implements the part of `python -m tensorboard.main` that nnictl depends on.
PROGRAM = """\
import code, socket, sys, signal
code.InteractiveInterpreter
print(sys.argv[1:], flush=True)
server = socket.create_server((sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])))
signal.pause()
"""


@pytest.fixture
def installed(home, monkeypatch):
    """Installs a program in place of TensorBoard, and ends its remaining processes after the test."""
    folder = home / "packages/tensorboard"

    def install(program):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "main.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.syspath_prepend(str(folder.parent))

    yield install
    main.run(["tensorboard", "stop", "abc"])


def test_tensorboard_start_prints_the_install_command_if_tensorboard_is_missing(
    nnictl, an_experiment, monkeypatch
):
    an_experiment("abc11111")
    monkeypatch.setattr(tensorboards, "find_spec", lambda name: None)
    code, _, err = nnictl("tensorboard", "start", "abc")
    assert (code, err) == (
        1,
        f"ERROR: cannot start TensorBoard: it is not installed for {sys.executable}; run `{sys.executable} -m pip install "
        "tensorboard`\n",
    )


# In production, nnictl exits before TensorBoard. Here nnictl runs inside pytest, so Python warns that the subprocess still runs.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tensorboard_serves_the_folder_of_a_trial_until_nnictl_tensorboard_stop_is_run(
    nnictl, an_experiment, installed
):
    installed(PROGRAM)
    folder = an_experiment("abc11111")
    written = folder.workspace.attempt(AttemptKey("aB3dE", attempt_id(0), "main")).output / "tensorboard"
    written.mkdir(parents=True)
    # Annotated code in the experiment's folder may be untrusted, so nnictl must not import modules from this folder.
    folder.generated_code.mkdir(exist_ok=True)
    (folder.generated_code / "__init__.py").touch()
    code, out, err = nnictl("tensorboard", "start", "abc", "-T", "aB3", "--port", "auto")
    assert (code, err) == (0, "")
    port = int(out.splitlines()[0].rpartition(":")[2])
    assert f"'--logdir_spec', 'aB3dE:{written}'" in (folder.log / "tensorboard.log").read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == 0
    assert nnictl("tensorboard", "stop", "abc")[1] == "INFO: Ended 1 TensorBoard of experiment abc11111\n"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert nnictl("tensorboard", "stop", "abc")[1] == "INFO: There is no TensorBoard of experiment abc11111\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_deleting_an_experiment_ends_its_tensorboards(nnictl, an_experiment, installed):
    installed(PROGRAM)
    folder = an_experiment("abc11111")
    key = AttemptKey("aB3dE", attempt_id(0), "main")
    (folder.workspace.attempt(key).output / "tensorboard").mkdir(parents=True)
    code, out, err = nnictl("tensorboard", "start", "abc", "-T", "aB3", "--port", "auto")
    assert (code, err) == (0, "")
    port = int(out.splitlines()[0].rpartition(":")[2])
    assert nnictl("experiment", "delete", "abc", "--yes", "--force")[0] == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_error_names_the_trial_if_the_trial_has_no_tensorboard_files(nnictl, an_experiment, installed):
    installed(PROGRAM)
    an_experiment("abc11111")
    code, _, err = nnictl("tensorboard", "start", "abc", "-T", "xY9zW")
    assert (code, "cannot show trial xY9zW in TensorBoard: it has written nothing to " in err) == (1, True)


def test_the_error_of_a_failed_tensorboard_start_contains_the_last_output_of_tensorboard(
    nnictl, an_experiment, installed
):
    installed("raise SystemExit('no GPU today')")
    an_experiment("abc11111")
    code, _, err = nnictl("tensorboard", "start", "abc", "--port", "auto")
    assert code == 1
    assert err.startswith("ERROR: cannot start TensorBoard: it ended with exit code 1: no GPU today; see ")
    assert nnictl("tensorboard", "stop", "abc")[1] == "INFO: There is no TensorBoard of experiment abc11111\n"


# ---- completion


def completed(words, prefix):
    """The suggestions that nnictl prints if bash requests the completion of a command line."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from nni_manager.cli.main import main; sys.argv[0] = 'nnictl'; main()",
        ],
        env=os.environ
        | {
            "_NNICTL_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["nnictl", *words, prefix]),
            "COMP_CWORD": str(len(words) + 1),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.slow
def test_a_shell_completes_commands_and_ids_of_experiments_and_trials(an_experiment):
    for name in ("abc11111", "abd22222", "xyz33333"):
        an_experiment(name)
    assert completed(["experiment"], "sh") == ["show"]
    assert completed(["resume"], "ab") == ["abc11111", "abd22222"]
    assert completed(["trial", "show", "xyz", "--trial-id"], "x") == ["xY9zW"]
    # An id prefix that several experiments share yields no suggestion and no error.
    assert completed(["trial", "show", "ab", "--trial-id"], "x") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_completion_script(nnictl, shell):
    code, out, err = nnictl("completion", shell)
    assert (code, err) == (0, "")
    assert f"_NNICTL_COMPLETE={shell}_complete" in out


@pytest.mark.slow
def test_a_manager_does_not_import_modules_from_the_folder_of_its_experiment(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/__init__.py").touch()
    program = (
        f"import sys; sys.argv[1:] = ['--folder', '{tmp_path}', '--port', '0']; from nni_manager.__main__ import main; "
        "main(); import code; print(code.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("/code.py\n")


# ---- help


def test_nnictl_help_lists_all_pages_and_prints_a_named_page(nnictl):
    code, out, err = nnictl("help")
    assert (code, err) == (0, "")
    assert "tuners\tA tuner proposes the parameters of each trial\n" in out
    assert "internals" not in out
    shown = nnictl("help", "tuners")[1]
    assert shown.startswith("# Tuners\n")
    # A page is also found by the name of its file.
    assert nnictl("help", "docs/tuners.md")[1] == shown


def test_each_page_in_the_nnictl_help_list_has_a_description_of_more_than_three_words(nnictl):
    for line in nnictl("help")[1].splitlines()[3:]:
        topic, content = line.split("\t")
        assert len(content.split()) > 3, line
        assert content.casefold() != topic.replace("-", " ")
        assert not set("#|`[]") & set(content), line


def test_nnictl_help_of_a_command_equals_the_output_of_its_help_option(nnictl):
    assert nnictl("help", "trial", "ls") == nnictl("trial", "ls", "--help")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("tuner", "tuners"),
        ("trial lss", "trial ls"),
        ("creat", "create"),
        ("experiment lis", "experiment list"),
    ],
)
def test_nnictl_help_for_an_unknown_topic_suggests_a_similar_topic(nnictl, words, near):
    code, out, err = nnictl("help", *words.split())
    assert (code, out) == (1, "")
    assert err == (
        f"ERROR: cannot find a page or a command '{words}'; did you mean `nnictl help {near}`? `nnictl help` lists all pages\n"
    )


def test_no_error_message_names_a_documentation_file_of_the_repository(nnictl):
    """An installed package does not contain the docs folder of the repository."""
    found = [
        f"{path}: {line}"
        for folder in ("manager/nni_manager", "trial_keeper", "nni_sdk")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"docs/[a-z-]+\.md", line.partition("#")[0]) and ('"' in line and '"""' not in line)
    ]
    assert found == []
