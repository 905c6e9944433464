"""Checkpoints in the workspace: keepers sign checkpoints, and a trial receives only signed checkpoints of its experiment."""

import json
import os
from dataclasses import replace

import pytest
from another_user import as_another_user
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.trial import Trial
from nni_manager.engine.shared_files import SharedFiles, Signer
from trial_keeper.host.attempt_files import claim_attempt
from trial_keeper.host.checkpoints import CheckpointSigner, offer_checkpoints
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.checkpoints import (
    Checkpoint,
    Manifest,
    checkpoint_of,
    checkpoints_from_bytes,
    checkpoints_to_bytes,
    newest_first,
)
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.signatures import FIELD, DocumentInvalid, SignatureInvalid, check_signature, signed
from trial_keeper.wire.workspace import Workspace

TRIAL = TrialDocument("trial1", 0, "true", "/code")
TOKENS = {"job": "f00d", "earlier": "f00f"}
SETTINGS = KeeperSettings("EXPT", "job", "/unused", TOKENS["job"])
EARLIER = KeeperSettings("EXPT", "earlier", "/unused", TOKENS["earlier"])
SIGNER = Signer("EXPT", "job", TOKENS.__getitem__)
_NOBODY = 65534


@pytest.fixture
def workspace(tmp_path):
    workspace = Workspace(tmp_path / "EXPT")
    for trial_id in ("trial1", "parent"):
        folder = workspace.trial(trial_id)
        folder.path.mkdir(parents=True)
        folder.trial_json.write_bytes(replace(TRIAL, trial_id=trial_id).to_bytes())
        folder.parameter_cfg.write_text('{"parameter_id": 0, "parameters": {}}')
    return workspace


def started(workspace, number, settings=SETTINGS, trial_id="trial1", task="main-0"):
    return claim_attempt(workspace, settings, trial_id, task, attempt_id(number))


def save(folder, name, digest="d1"):
    folder.checkpoints.mkdir(exist_ok=True)
    (folder.checkpoints / name).mkdir()
    manifest = {"name": name, "entry": "", "digest": digest, "bytes": 1, "reports": 7}
    (folder.checkpoints / f"{name}.json").write_text(json.dumps(manifest))


def saved(workspace, number, *names, **how):
    """Create an attempt that has the named checkpoints, and sign them as its keeper does. Return the folder of the attempt."""
    key, folder = started(workspace, number, **how)
    for name in names:
        save(folder, name)
    CheckpointSigner(how.get("settings", SETTINGS), key, folder).sign_new()
    return folder


def a_trial(**fields):
    return Trial("trial1", 0, {}, {}, 0.0, job_id="job", **fields)


def offered(workspace, number=9, trial=TRIAL):
    key, folder = started(workspace, number)
    sources, refusals = offer_checkpoints(workspace, SETTINGS, trial, key)
    if folder.checkpoint_sources_json.exists():
        named = json.loads(folder.checkpoint_sources_json.read_text())["checkpoints"]
        paths = [os.path.join(each["folder"], each["name"]) for each in named]
        assert [os.path.isdir(path) for path in paths] == [True] * len(paths)
        assert [(each["name"], each["attempt_id"]) for each in named] == [
            (each.name, each.attempt_id) for each in sources
        ]
    return [(each.attempt_id, each.name) for each in sources], refusals


def test_no_checkpoint_document_is_written_for_a_trial_without_checkpoints(workspace):
    key, folder = started(workspace, 0)
    assert CheckpointSigner(SETTINGS, key, folder).sign_new() == []
    assert not folder.checkpoints_json.exists()
    assert offered(workspace) == ([], [])
    assert not workspace.attempt(
        AttemptKey("trial1", attempt_id(9), "main-0")
    ).checkpoint_sources_json.exists()


def test_the_next_attempt_of_a_job_receives_the_newest_checkpoints_first(workspace):
    saved(workspace, 0, "000001", "000002")
    saved(workspace, 1)
    saved(workspace, 2, "000001")
    expected = [(attempt_id(2), "000001"), (attempt_id(0), "000002"), (attempt_id(0), "000001")]
    assert offered(workspace) == (expected, [])


def test_a_keeper_signs_each_checkpoint_once_and_removes_deleted_checkpoints_from_its_list(workspace):
    key, folder = started(workspace, 0)
    signer = CheckpointSigner(SETTINGS, key, folder)
    save(folder, "000001")
    assert signer.sign_new() == ["000001"]
    before = folder.checkpoints_json.stat().st_ino
    assert signer.sign_new() == []
    assert folder.checkpoints_json.stat().st_ino == before
    save(folder, "000002")
    (folder.checkpoints / "000001.json").unlink()
    assert signer.sign_new() == ["000002"]
    assert offered(workspace) == ([(attempt_id(0), "000002")], [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"name": "000002"}',
        b'{"name": "../000001", "entry": "", "digest": "d", "reports": 0}',
        b'{"name": "000001", "entry": "", "digest": "d", "reports": 0}',
        b'{"name": "000002", "entry": "../x", "digest": "d", "reports": 0}',
        b'{"name": "000002", "entry": "", "digest": "d", "reports": -1}',
        b" " * 5000,
    ],
)
def test_an_invalid_checkpoint_manifest_is_not_signed(workspace, content):
    folder = saved(workspace, 0, "000001")
    (folder.checkpoints / "000002.json").write_bytes(content)
    key = AttemptKey("trial1", attempt_id(0), "main-0")
    assert CheckpointSigner(SETTINGS, key, folder).sign_new() == ["000001"]


@pytest.mark.any_machine
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_keeper_does_not_sign_a_checkpoint_manifest_that_another_user_owns(workspace):
    key, folder = started(workspace, 0)
    save(folder, "000001")
    os.chown(folder.checkpoints / "000001.json", _NOBODY, _NOBODY)
    assert CheckpointSigner(SETTINGS, key, folder).sign_new() == []


def test_a_changed_or_moved_checkpoint_document_is_refused(workspace):
    folder = saved(workspace, 0, "000001")
    content = folder.checkpoints_json.read_bytes()
    moved = started(workspace, 1)[1]
    moved.checkpoints_json.write_bytes(content)
    folder.checkpoints_json.write_bytes(content.replace(b'"d1"', b'"d2"'))
    sources, refusals = offered(workspace)
    assert sources == []
    assert ["not signed with the token" in refusals[0], "names another attempt" in refusals[1]] == [
        True,
        True,
    ]


def test_the_trial_document_lists_checkpoints_signed_by_keepers_of_earlier_jobs(workspace):
    saved(workspace, 0, "000001", settings=EARLIER)
    # The checkpoint is signed with the token of an earlier job. A keeper cannot verify this signature, so it needs the list of
    # the manager.
    assert offered(workspace, 1) == ([], [])
    found = SharedFiles(workspace).find_checkpoints(a_trial(), SIGNER)
    document = replace(TRIAL, checkpoints=tuple(found))
    assert TrialDocument.from_bytes(document.to_bytes()) == document
    saved(workspace, 2, "000001")
    expected = [(attempt_id(2), "000001"), (attempt_id(0), "000001")]
    assert offered(workspace, trial=document) == (expected, [])


def test_the_manager_refuses_checkpoints_without_a_valid_keeper_signature(workspace, caplog):
    folder = saved(workspace, 0, "000001", settings=EARLIER)
    folder.checkpoints_json.write_bytes(folder.checkpoints_json.read_bytes().replace(b"d1", b"d2"))
    assert SharedFiles(workspace).find_checkpoints(a_trial(), SIGNER) == []
    assert "refused the checkpoints" in caplog.text


def test_an_attempt_folder_that_the_manager_cannot_read_hides_no_checkpoint_of_another_attempt(
    workspace, open_way
):
    saved(workspace, 0, "000001", settings=EARLIER)
    # Any user of the cluster may create an attempt folder that the manager cannot read.
    closed = workspace.attempt(AttemptKey("trial1", attempt_id(1), "main-0")).path
    closed.mkdir(parents=True)
    for folder in (workspace.root, *workspace.root.glob("**")):
        folder.chmod(0o755)
    closed.chmod(0o700)
    with as_another_user():
        (found,) = SharedFiles(workspace).find_checkpoints(a_trial(), SIGNER)
    assert found.attempt_id == attempt_id(0)


def test_a_continued_trial_receives_its_own_checkpoints_before_checkpoints_of_its_parent(workspace):
    saved(workspace, 3, "000008", settings=EARLIER, trial_id="parent")
    find = SharedFiles(workspace).find_checkpoints
    assert [each.trial_id for each in find(a_trial(continues="parent"), SIGNER)] == ["parent"]
    assert find(a_trial(), SIGNER) == []
    saved(workspace, 1, "000001")
    both = find(a_trial(continues="parent"), SIGNER)
    assert [(each.trial_id, each.name) for each in both] == [("trial1", "000001"), ("parent", "000008")]


def test_a_task_receives_its_own_checkpoints_before_checkpoints_of_other_tasks(workspace):
    saved(workspace, 0, "000001")
    saved(workspace, 1, "000001", task="worker-1")
    assert offered(workspace)[0] == [(attempt_id(0), "000001"), (attempt_id(1), "000001")]


MANIFESTS = st.builds(
    Manifest,
    st.integers(0, 10**9).map(lambda number: f"{number:06d}"),
    st.sampled_from(["", "model.pt", "ä b", "a" * 255]),
    st.text("0123456789abcdef", min_size=1, max_size=64),
    st.integers(0, 2**63 - 1),
)
KEYS = st.builds(AttemptKey, st.just("trial1"), st.integers(0, 99).map(attempt_id), st.just("main-0"))


@given(st.lists(MANIFESTS, max_size=5), KEYS)
def test_a_signed_checkpoint_document_is_read_back_unchanged(manifests, key):
    content = checkpoints_to_bytes("EXPT", "job", key, manifests, "f00d")
    expected = [Checkpoint.of(key, manifest) for manifest in manifests]
    assert checkpoints_from_bytes(content, "EXPT", key, TOKENS.__getitem__) == expected
    with pytest.raises(SignatureInvalid):
        checkpoints_from_bytes(content, "EXPT", key, lambda _: "other")
    with pytest.raises(DocumentInvalid):
        checkpoints_from_bytes(content, "ANOTHER", key, TOKENS.__getitem__)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(
        lambda value: json.dumps({"job_id": "job", "checkpoints": value}).encode()
    )
)
def test_a_checkpoint_document_without_a_signature_is_invalid(content):
    key = AttemptKey("trial1", attempt_id(0), "main-0")
    with pytest.raises(DocumentInvalid):
        checkpoints_from_bytes(content, "EXPT", key, lambda _: "f00d")


def test_the_signature_of_a_document_is_the_same_in_all_versions_and_for_any_order_of_fields():
    # This signature must never change, because the keeper and the manager of an experiment may have different versions.
    signature = "c87237ca1d39a29f24bc8182114554fd3b5fe1aef16f4fe4fc158d7889163151"
    document = {"job_id": "job", "message": "größer", "checkpoints": []}
    assert signed("checkpoints.json", document, "f00d")[FIELD] == signature
    check_signature("checkpoints.json", {FIELD: signature, **dict(reversed(document.items()))}, "f00d")


VALID = {"name": "000001", "entry": "", "digest": "d1", "reports": 7}


@pytest.mark.parametrize(
    "checkpoints",
    [
        None,
        VALID,
        [[]],
        [VALID | {"name": "a"}],
        # str.isdigit() accepts this digit, but int() refuses it.
        [VALID | {"name": "²"}],
        [VALID | {"name": ""}],
        [VALID | {"entry": ".."}],
        [VALID | {"entry": "a/b"}],
        [VALID | {"entry": "a" * 256}],
        [VALID | {"reports": True}],
        # The largest integer of SQLite is 2**63 - 1.
        [VALID | {"reports": 2**63}],
    ],
)
def test_a_signed_checkpoint_document_with_an_invalid_field_is_refused(checkpoints):
    key = AttemptKey("trial1", attempt_id(0), "main-0")
    valid = json.loads(checkpoints_to_bytes("EXPT", "job", key, [Manifest(**VALID)], "f00d"))
    document = {name: value for name, value in valid.items() if name != FIELD}
    content = json.dumps(signed("checkpoints.json", document | {"checkpoints": checkpoints}, "f00d"))
    with pytest.raises(DocumentInvalid) as refusal:
        checkpoints_from_bytes(content.encode(), "EXPT", key, TOKENS.__getitem__)
    assert not isinstance(refusal.value, SignatureInvalid)


@pytest.mark.parametrize("content", [b"[]", b"7", b'"trial1"', b"null"])
def test_a_checkpoint_document_that_is_no_json_object_is_refused(content):
    key = AttemptKey("trial1", attempt_id(0), "main-0")
    with pytest.raises(DocumentInvalid):
        checkpoints_from_bytes(content, "EXPT", key, TOKENS.__getitem__)
    with pytest.raises(DocumentInvalid):
        Manifest.from_bytes(content)


@pytest.mark.parametrize("checkpoint", [None, [], "000001", VALID])
def test_a_trial_document_with_an_invalid_checkpoint_is_refused(checkpoint):
    with pytest.raises(DocumentInvalid):
        checkpoint_of(checkpoint)
    document = json.loads(TRIAL.to_bytes()) | {"checkpoints": [checkpoint]}
    with pytest.raises(DocumentInvalid):
        TrialDocument.from_bytes(json.dumps(document).encode())


@given(st.lists(st.builds(Checkpoint.of, KEYS, MANIFESTS), max_size=20))
def test_a_trial_receives_at_most_ten_different_checkpoints(found):
    sources = newest_first(found + found, "trial1", "main-0")
    assert len(sources) == min(len(set(found)), 10)
    ranks = [(each.attempt_id, int(each.name)) for each in sources]
    assert ranks == sorted(ranks, reverse=True)
