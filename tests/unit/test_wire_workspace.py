"""Paths and documents of a workspace."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.wire.documents import (
    AttemptDocument,
    ManagerDocument,
    TrialDocument,
    exit_from_bytes,
    exit_to_bytes,
    stop_from_bytes,
    stop_to_bytes,
)
from trial_keeper.wire.messages import (
    LATEST_S,
    MAX_CHARACTERS_OF_ENVIRONMENT,
    MAX_CHARACTERS_OF_WARNING,
    MAX_SIZE,
    MAX_WARNINGS,
    AttemptKey,
    StopTrial,
    Stream,
    TrialEnded,
)
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason
from trial_keeper.wire.safe_open import is_safe_name
from trial_keeper.wire.signatures import DocumentInvalid, SignatureInvalid, check_signature
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import Workspace

WORKSPACE = Workspace(Path("/mnt/exp"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
TIMES = st.floats(0, LATEST_S)
MANAGER_DOCUMENTS = st.builds(
    ManagerDocument, TEXT, TEXT, st.lists(TEXT, min_size=1).map(tuple), st.none() | TEXT
)
TRIAL_DOCUMENTS = st.builds(
    TrialDocument,
    TEXT,
    st.integers(0),
    TEXT,
    TEXT,
    st.none() | st.lists(st.integers(0, 99)).map(tuple),
    st.none() | TEXT,
)
ENDS = st.builds(
    TrialEnded,
    st.builds(AttemptKey, TEXT, st.integers(0, 10**26 - 1).map(attempt_id), TEXT),
    st.sampled_from(ExitReason),
    st.integers(0, 255),
    TIMES,
    TIMES,
    st.dictionaries(st.sampled_from(Stream), st.integers(0, MAX_SIZE)),
    TEXT,
    st.none() | st.integers(0, MAX_SIZE),
    st.lists(TEXT, max_size=MAX_WARNINGS).map(tuple),
)
TOKEN = "f00d"
READERS: dict[str, Callable[[bytes], object]] = {
    "attempt.json": lambda content: AttemptDocument.from_bytes(content, lambda job_id: TOKEN),
    "manager.json": ManagerDocument.from_bytes,
    "trial.json": TrialDocument.from_bytes,
    "exit.json": lambda content: exit_from_bytes(content, TOKEN),
    "stop.json": stop_from_bytes,
}
KEY = AttemptKey("abcde", attempt_id(0), "main")
ATTEMPT = AttemptDocument("exp", "job", KEY, 12.5)
SAMPLES = {
    "attempt.json": ATTEMPT.to_bytes(TOKEN),
    "manager.json": ManagerDocument("exp", "0.6.0", ("10.0.0.1:8081",)).to_bytes(),
    "trial.json": TrialDocument("abcde", 0, "true", "", (0,), "code-0a1b.tar.gz").to_bytes(),
    "exit.json": exit_to_bytes(
        TrialEnded(
            KEY,
            ExitReason.SUCCEEDED,
            0,
            1.0,
            2.0,
            {Stream.METRICS: 3},
            metrics_size_at_stop=2,
            warnings=("its metrics file was truncated",),
        ),
        TOKEN,
    ),
    "stop.json": stop_to_bytes(StopTrial("abcde", ExitReason.STOPPED_BY_USER)),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=5,
)


# ---- paths


def test_the_paths_of_a_workspace_match_the_documentation() -> None:
    trial = WORKSPACE.trial("abcde")
    attempt = WORKSPACE.attempt(AttemptKey("abcde", attempt_id(2), "worker-0"))
    folder = f"/mnt/exp/trials/abcde/attempts/{attempt_id(2)}/worker-0"
    assert {
        str(WORKSPACE.manager_json): "/mnt/exp/manager.json",
        str(WORKSPACE.run_sh): "/mnt/exp/run.sh",
        str(WORKSPACE.sdk): "/mnt/exp/sdk",
        str(WORKSPACE.code_snapshot("0a1b")): "/mnt/exp/code-0a1b.tar.gz",
        str(attempt.code): f"{folder}/code",
        str(trial.trial_json): "/mnt/exp/trials/abcde/trial.json",
        str(trial.parameter_cfg): "/mnt/exp/trials/abcde/parameter.cfg",
        str(trial.stop_json): "/mnt/exp/trials/abcde/stop.json",
        WORKSPACE.warm_marker("job-1"): "/mnt/exp/warm/job-1",
        str(attempt.path): folder,
        str(attempt.parameter_cfg): f"{folder}/parameter.cfg",
        str(attempt.attempt_json): f"{folder}/attempt.json",
        str(attempt.exit_json): f"{folder}/exit.json",
        str(attempt.stream(Stream.METRICS)): f"{folder}/.nni/metrics",
        str(attempt.stream(Stream.STDOUT)): f"{folder}/output/stdout",
        str(attempt.stream(Stream.STDERR)): f"{folder}/output/stderr",
        str(attempt.stream(Stream.KEEPER)): f"{folder}/output/trial.log",
    }.items() <= {path: path for path in map(str, _all_paths(trial, attempt))}.items()


def _all_paths(trial, attempt) -> list[Path]:
    return [
        WORKSPACE.manager_json,
        WORKSPACE.run_sh,
        WORKSPACE.sdk,
        WORKSPACE.code_snapshot("0a1b"),
        attempt.code,
        trial.trial_json,
        trial.parameter_cfg,
        trial.stop_json,
        attempt.path,
        attempt.parameter_cfg,
        attempt.attempt_json,
        attempt.exit_json,
        Path(WORKSPACE.warm_marker("job-1")),
        *map(attempt.stream, Stream),
    ]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/", "/etc", "a\\b", "a b", "a\n", "a\0", "-rf", ".git", "é", "x" * 241],
)
def test_a_name_that_is_not_a_plain_folder_name_is_refused(name: str) -> None:
    assert not is_safe_name(name)
    with pytest.raises(ValueError, match="cannot use"):
        WORKSPACE.trial(name)
    with pytest.raises(ValueError, match="cannot use"):
        WORKSPACE.attempt(AttemptKey("abcde", attempt_id(0), name))
    with pytest.raises(ValueError, match="cannot use"):
        WORKSPACE.file(name)


@given(st.text())
def test_any_accepted_name_is_a_folder_directly_inside_the_trials_folder(name: str) -> None:
    try:
        path = WORKSPACE.trial(name).path
    except ValueError:
        return
    assert Path(os.path.normpath(path)).parent == WORKSPACE.trials


def test_attempts_of_version_0_6_are_listed_before_attempts_with_a_start_time(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.attempts_of("abcde") == []
    keys = [
        AttemptKey("abcde", attempt_id(2), "b"),
        AttemptKey("abcde", attempt_id(10), "a"),
        AttemptKey("abcde", attempt_id(2), "a"),
        AttemptKey("abcde", "10", "a"),
        AttemptKey("abcde", "9", "a"),
    ]
    for key in keys:
        workspace.attempt(key).path.mkdir(parents=True)
    (workspace.trial("abcde").attempts / "notes").mkdir()
    assert workspace.attempts_of("abcde") == [keys[4], keys[3], keys[2], keys[0], keys[1]]


def test_only_folders_named_by_attempt_ids_are_listed_as_attempts(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    own = AttemptKey("abcde", attempt_id(0), "a")
    workspace.attempt(own).path.mkdir(parents=True)
    attempts = workspace.trial("abcde").attempts
    for name in ("01", "٣", "9" * 10, "9" * 200, "-1", "I" * 26, "8" + "0" * 25, attempt_id(1).lower() + "x"):
        (attempts / name / "a").mkdir(parents=True)
    (attempts / attempt_id(1)).write_text("a file")
    (attempts / attempt_id(2)).symlink_to(attempts / attempt_id(0))
    (attempts / attempt_id(0) / "a file").write_text("")
    (attempts / attempt_id(0) / "b").symlink_to(attempts / attempt_id(0) / "a")
    assert workspace.attempts_of("abcde") == [own]


@pytest.mark.slow
def test_only_the_newest_thousand_attempts_are_listed(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for number in range(1010):
        workspace.attempt(AttemptKey("abcde", attempt_id(number), "a")).path.mkdir(parents=True)
    assert [int(key.attempt_id) for key in workspace.attempts_of("abcde")] == [*range(10, 1010)]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folders")
def test_folders_of_another_user_do_not_hide_the_attempts_of_a_keeper(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    own = AttemptKey("abcde", attempt_id(0), "a")
    workspace.attempt(own).path.mkdir(parents=True)
    for number in range(1, 1005):
        folder = workspace.attempt(AttemptKey("abcde", attempt_id(number), "a")).path
        folder.mkdir(parents=True)
        os.chown(folder.parent, 65534, 65534)
    found = workspace.attempts_of("abcde")
    assert (found[0], len(found)) == (own, 1001)


# ---- documents


@given(MANAGER_DOCUMENTS)
def test_manager_json_is_read_back_unchanged(document: ManagerDocument) -> None:
    assert ManagerDocument.from_bytes(document.to_bytes()) == document


@given(TRIAL_DOCUMENTS)
def test_trial_json_is_read_back_unchanged(document: TrialDocument) -> None:
    assert TrialDocument.from_bytes(document.to_bytes()) == document


@pytest.mark.parametrize(
    "change",
    [
        {"started_at_s": float("nan")},
        {"ended_at_s": float("inf")},
        {"ended_at_s": 1e300},
        {"started_at_s": -1},
        {"exit_code": 10**30},
        {"exit_code": -1},
        {"exit_code": 256},
        {"metrics_size_at_stop": -1},
        {"metrics_size_at_stop": 2**63},
        {"warnings": ["x"] * (MAX_WARNINGS + 1)},
        {"warnings": ["x" * (MAX_CHARACTERS_OF_WARNING + 1)]},
        {"warnings": "x"},
        {"message": "\ud800"},
        {"environment": {"host": "h" * (MAX_CHARACTERS_OF_ENVIRONMENT + 1)}},
        {"environment": {"node": "two\nlines"}},
        {"environment": {"packages": "not hexadecimal"}},
        {"environment": {"packages": "ab" * 31}},
        {"environment": {"packages": "g" * 64}},
    ],
)
def test_an_exit_json_with_an_out_of_range_value_is_invalid(change: dict[str, object]) -> None:
    document = json.loads(SAMPLES["exit.json"]) | change
    with pytest.raises(DocumentInvalid, match=r"exit\.json"):
        exit_from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize("reason", sorted(set(ExitReason) - STOP_REASONS))
def test_a_stop_json_whose_reason_is_not_a_stop_reason_is_invalid(reason: ExitReason) -> None:
    with pytest.raises(DocumentInvalid, match=r"cannot read stop\.json: .*is not a reason to stop a trial"):
        stop_from_bytes(stop_to_bytes(StopTrial("abcde", reason)))


@pytest.mark.parametrize("reason", sorted(STOP_REASONS))
def test_stop_json_is_read_back_unchanged(reason: ExitReason) -> None:
    stop = StopTrial("abcde", reason)
    assert stop_from_bytes(stop_to_bytes(stop)) == stop


@given(ENDS)
def test_exit_json_is_read_back_unchanged(ended: TrialEnded) -> None:
    assert exit_from_bytes(exit_to_bytes(ended, TOKEN), TOKEN) == ended


def test_an_exit_json_without_optional_fields_is_read() -> None:
    document = json.loads(SAMPLES["exit.json"])
    del document["metrics_size_at_stop"], document["warnings"]
    ended = exit_from_bytes(json.dumps(document).encode())
    assert (ended.metrics_size_at_stop, ended.warnings) == (None, ())


@pytest.mark.parametrize("name", READERS)
@given(content=st.binary() | JSON.map(json.dumps).map(str.encode))
def test_arbitrary_bytes_are_rejected_as_an_invalid_document(name: str, content: bytes) -> None:
    with pytest.raises(DocumentInvalid, match=f"cannot read {name}"):
        READERS[name](content)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_document_with_a_field_of_a_wrong_type_is_invalid(name: str, data: st.DataObject) -> None:
    sample = json.loads(SAMPLES[name])
    field = data.draw(st.sampled_from(sorted(sample)))
    original = type(sample[field])
    sample[field] = data.draw(JSON)
    try:
        READERS[name](json.dumps(sample).encode())
    except DocumentInvalid:
        return
    numbers = (int, float) if original is float else (original,)
    may_be_null = ("gpu_indices", "code_snapshot", "metrics_size_at_stop")
    is_absent = field in may_be_null and sample[field] is None
    assert is_absent or type(sample[field]) in numbers


@pytest.mark.parametrize("name", READERS)
def test_the_error_for_a_missing_required_field_contains_the_name_of_the_field(name: str) -> None:
    for field in json.loads(SAMPLES[name]):
        if field in (
            "certificate",
            "code_snapshot",
            "seed",
            "result_metrics",
            "metrics_size_at_stop",
            "warnings",
            "environment",
        ):
            continue  # earlier versions do not write these fields, so they are optional
        sample = json.loads(SAMPLES[name])
        del sample[field]
        why = "was not signed" if field == "signature" else field
        with pytest.raises(DocumentInvalid, match=why):
            READERS[name](json.dumps(sample).encode())


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe{", b'{"a": 1', b"[]", b"null"])
def test_a_document_that_is_not_a_json_object_is_invalid(name: str, content: bytes) -> None:
    with pytest.raises(DocumentInvalid):
        READERS[name](content)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exit_code", 2**31),
        ("exit_code", 10**400),
        ("started_at_s", math.nan),
        ("ended_at_s", math.inf),
        ("ended_at_s", -1.0),
        ("ended_at_s", 10**400),
        ("final_sizes", {"metrics": -1}),
        ("final_sizes", {"metrics": 2**63}),
        ("final_sizes", [["metrics", 1]]),
        ("reason", ["succeeded"]),
        ("message", "half of a pair: \ud800"),
        ("trial_id", "\udfff"),
    ],
)
def test_an_exit_json_with_values_that_cannot_be_stored_is_invalid(field: str, value: object) -> None:
    sample = json.loads(SAMPLES["exit.json"]) | {field: value}
    with pytest.raises(DocumentInvalid, match=r"cannot read exit\.json"):
        exit_from_bytes(json.dumps(sample).encode())


@pytest.mark.parametrize("name", READERS)
def test_every_truncated_document_is_invalid(name: str) -> None:
    whole = SAMPLES[name].rstrip()
    for length in range(len(whole)):
        with pytest.raises(DocumentInvalid):
            READERS[name](whole[:length])


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    later = json.loads(SAMPLES["manager.json"]) | {"certificate": "..."}
    assert ManagerDocument.from_bytes(json.dumps(later).encode()).addresses == ("10.0.0.1:8081",)


def test_a_trial_json_of_an_earlier_version_has_no_code_snapshot() -> None:
    earlier = json.loads(TrialDocument("abcde", 0, "true", "/code").to_bytes())
    del earlier["code_snapshot"], earlier["seed"], earlier["result_metrics"]
    assert TrialDocument.from_bytes(json.dumps(earlier).encode()) == TrialDocument(
        "abcde", 0, "true", "/code"
    )


def test_a_workspace_reads_its_manager_json_and_the_uid_of_the_files_owner(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.manager_json.write_bytes(SAMPLES["manager.json"])
    document = ManagerDocument("exp", "0.6.0", ("10.0.0.1:8081",))
    assert workspace.read_manager_json() == (document, os.geteuid())


def test_a_manager_json_without_an_address_is_invalid() -> None:
    content = json.dumps(json.loads(SAMPLES["manager.json"]) | {"addresses": []}).encode()
    with pytest.raises(DocumentInvalid, match="no address"):
        ManagerDocument.from_bytes(content)


# ---- replace_file


def test_a_replaced_file_is_complete_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "manager.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_open_reader_of_a_replaced_file_reads_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "manager.json"
    replace_file(path, b"old content")
    with path.open("rb") as reader:
        first = reader.read(3)
        replace_file(path, b"NEW CONTENT")
        assert first + reader.read() == b"old content"


def test_a_failed_write_leaves_the_old_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "manager.json"
    replace_file(path, b"old")
    # A folder at the temporary path prevents the creation of the temporary file.
    (tmp_path / ".manager.json.new").mkdir()
    with pytest.raises(OSError, match=r"manager\.json"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


# ---- signatures


@given(ENDS, st.text("0123456789abcdef", min_size=1))
def test_an_exit_json_can_be_verified_only_with_the_token_that_signed_it(
    ended: TrialEnded, token: str
) -> None:
    content = exit_to_bytes(ended, TOKEN)
    assert exit_from_bytes(content) == exit_from_bytes(content, TOKEN) == ended
    if token != TOKEN:
        with pytest.raises(SignatureInvalid):
            exit_from_bytes(content, token)


@pytest.mark.parametrize("name", ["attempt.json", "exit.json"])
@given(data=st.data())
def test_a_signed_document_with_a_changed_field_is_refused(name: str, data: st.DataObject) -> None:
    document = json.loads(SAMPLES[name])
    field = data.draw(st.sampled_from(sorted(document)))
    value = data.draw(TEXT | st.integers() | st.floats(0, 1e9) | st.none())
    changed = document | {field: value}
    if json.dumps(changed) == json.dumps(document):
        return
    with pytest.raises(DocumentInvalid):
        READERS[name](json.dumps(changed).encode())


def test_a_signature_is_invalid_for_a_different_kind_of_document() -> None:
    document = json.loads(ATTEMPT.to_bytes(TOKEN))
    check_signature("attempt.json", document, TOKEN)
    with pytest.raises(SignatureInvalid, match=r"exit\.json was not signed with the token of its job"):
        check_signature("exit.json", document, TOKEN)


def test_an_attempt_document_is_verified_with_the_token_of_the_job_named_in_the_document() -> None:
    asked: list[str] = []
    read = AttemptDocument.from_bytes(ATTEMPT.to_bytes(TOKEN), lambda job_id: asked.append(job_id) or TOKEN)
    assert (read, asked) == (ATTEMPT, ["job"])
