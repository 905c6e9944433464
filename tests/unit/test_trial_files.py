"""What the manager writes into a workspace before any job starts."""

from pathlib import Path

import nni_sdk
from nni_manager.engine.trial_files import LeftBehind, left_behind, write_experiment
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import ManagerDocument, Workspace, exit_to_bytes

DOCUMENT = ManagerDocument("expABCDE", "0.6.0", ("127.0.0.1:1",))
SDK = {path.name: path.read_bytes() for path in Path(nni_sdk.__file__).parent.glob("*.py")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_workspace_has_the_managers_own_sdk_and_nothing_beside_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_experiment(workspace, DOCUMENT, "exit\n")
    assert [path.name for path in workspace.sdk.iterdir()] == ["nni_sdk"]
    assert contents(workspace.sdk / "nni_sdk") == SDK
    assert {"__init__.py", "trial.py", "records.py"} <= SDK.keys()


def test_a_later_manager_touches_only_what_differs_and_swaps_it_whole(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_experiment(workspace, DOCUMENT, "exit\n")
    folder = workspace.sdk / "nni_sdk"
    (folder / "errors.py").unlink()
    (folder / "trial.py").write_bytes(b"# of an earlier version")
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    with (folder / "trial.py").open("rb") as being_read:
        write_experiment(workspace, DOCUMENT, "exit\n")
        assert being_read.read() == b"# of an earlier version"
    assert contents(folder) == SDK
    touched = {path.name for path in folder.iterdir() if path.stat().st_ino != before.get(path.name)}
    assert touched == {"errors.py", "trial.py"}


def test_an_end_that_speaks_of_another_attempt_says_nothing(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    own, others = AttemptKey("abcde", 0, "main-0"), AttemptKey("vwxyz", 0, "main-0")
    folder = workspace.attempt(own)
    folder.path.mkdir(parents=True)
    for speaks_of in (others, AttemptKey("abcde", 1, "main-0"), AttemptKey("abcde", 0, "main-1")):
        folder.exit_json.write_bytes(exit_to_bytes(TrialEnded(speaks_of, ExitReason.SUCCEEDED, 0, 1.0, 2.0)))
        assert left_behind(workspace, "abcde") == [LeftBehind(own, None)]
    ended = TrialEnded(own, ExitReason.SUCCEEDED, 0, 1.0, 2.0)
    folder.exit_json.write_bytes(exit_to_bytes(ended))
    assert left_behind(workspace, "abcde") == [LeftBehind(own, ended)]
