"""An Azure share, used through Azure's real SDK: uploads, downloads, and the secrecy of the account key."""

import base64
import contextlib
import logging
import shutil

import pytest
from azure_here import ACCOUNT, FILE_HOST, SECRET, SHARE, VAULT, Azure, new_key

pytest.importorskip("azure.storage.fileshare")

from attempts import attempt_id
from keeper_bundles import make_bundle

from nni_manager.domain.trial import Trial
from nni_manager.engine.shared_files import SharedFiles, Signer
from nni_manager.errors import UserError
from nni_manager.training_services.base import Placement
from nni_manager.training_services.kubernetes.azure_share import AzureShare
from nni_manager.training_services.kubernetes.section import AzureStorage
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from nni_manager.training_services.share import StorageUnavailable
from trial_keeper.wire.documents import AttemptDocument, ManagerDocument, exit_to_bytes, stop_from_bytes
from trial_keeper.wire.messages import AttemptKey, StopTrial, Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.workspace import Workspace

STORAGE = AzureStorage(ACCOUNT, SHARE, VAULT, SECRET)
QUICK = ClientRetryPolicy(tries=3, first_s=0.001, longest_s=0.01, connect_within_s=5.0, answer_within_s=20.0)
KEY = AttemptKey("trial", attempt_id(0), "worker-0")
TOKEN = "f00d"
SIGNER = Signer("EXPT", "job", lambda _: TOKEN)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A fake Azure, and a share that has read its key from the vault."""
    folder = tmp_path_factory.mktemp("azure")
    with Azure(folder / "azure") as azure, pytest.MonkeyPatch.context() as patch:
        for name, value in azure.environ.items():
            patch.setenv(name, value)
        with contextlib.closing(AzureShare(STORAGE, folder / "EXPT", QUICK)) as share:
            yield azure, share


@pytest.fixture
def azure(site):
    azure, share = site
    azure.is_authenticated, azure.refuses, azure.fails_with = True, None, []
    azure.key = azure.vault_key = share._key
    if azure.share.exists():
        share.remove(share._root)
    azure.asked.clear()
    return azure


@pytest.fixture
def share(azure, site):
    return site[1]


@pytest.fixture
def workspace(site):
    workspace = Workspace(site[1]._root)
    shutil.rmtree(workspace.root, ignore_errors=True)
    workspace.trials.mkdir(parents=True)
    return workspace


def contents(folder):
    """The content of a folder as keepers see it: all files, and all empty folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def a_trial():
    return Trial("trial", 0, {"x": 1}, {}, 0.0, "trial")


# ---- files that keepers read


def test_all_files_for_keepers_are_uploaded_and_manager_json_is_uploaded_last(azure, share, workspace):
    files = SharedFiles(workspace, share)
    # This snapshot is so large that its upload needs several range requests.
    workspace.code_snapshot("c0de").write_bytes(bytes(range(256)) * 20_000)
    workspace.checkpoints.mkdir()
    document = ManagerDocument("EXPT", "0.6.0", ("10.0.0.1:8081",))
    files.write_experiment(document, "echo\n", "code-c0de.tar.gz")
    assert contents(azure.share / "EXPT") == contents(workspace.root)
    assert azure.writes()[-1] == "PUT nni/EXPT/manager.json?comp=rename"
    files.write_trial(a_trial(), "true", Placement(None, None), "code-c0de.tar.gz")
    files.write_stop(StopTrial("trial", ExitReason.STOPPED_BY_USER))
    files.write_experiment(ManagerDocument("EXPT", "0.6.0", ("10.0.0.2:8081",)), "echo\n", "code-c0de.tar.gz")
    assert contents(azure.share / "EXPT") == contents(workspace.root)
    # The trial is written once more, as if its job starts again. This must invalidate the stop request of the first start.
    files.write_trial(a_trial(), "true", Placement(None, None), "code-c0de.tar.gz")
    with pytest.raises(DocumentInvalid):
        stop_from_bytes((azure.share / "EXPT/trials/trial/stop.json").read_bytes())
    snapshots = [call for call in azure.writes() if "code-c0de" in call]
    assert [call for call in snapshots if "rename" in call] == ["PUT nni/EXPT/code-c0de.tar.gz?comp=rename"]


def test_the_keepers_bundle_is_uploaded_once(azure, share, workspace, tmp_path):
    bundle = make_bundle(tmp_path / "installed", ("cp311-x86_64", "frozen-x86_64"))
    for address in ("10.0.0.1:8081", "10.0.0.2:8081"):
        document = ManagerDocument("EXPT", "0.6.0", (address,))
        SharedFiles(workspace, share).write_experiment(document, "echo\n", None, bundle)
        assert contents(azure.share / "EXPT") == contents(workspace.root)
    archives = [call for call in azure.writes() if "keeper/" in call and "rename" in call]
    names = sorted(bundle.stored_name(name) for name in bundle.digests)
    assert archives == [f"PUT nni/EXPT/keeper/{name}?comp=rename" for name in names]


def test_an_upload_replaces_the_file_atomically_by_a_rename(azure, share, workspace):
    workspace.run_sh.write_bytes(b"x" * 5_000_000)
    share.send(workspace.run_sh)
    share.send(workspace.run_sh)
    under_its_name = {call for call in azure.writes() if call.startswith("PUT nni/EXPT/run.sh")}
    assert under_its_name == {"PUT nni/EXPT/run.sh?comp=rename"}
    assert list((azure.share / "EXPT").iterdir()) == [azure.share / "EXPT" / "run.sh"]


def test_an_upload_recreates_folders_that_were_deleted_from_the_share(azure, share, workspace):
    workspace.run_sh.write_text("echo\n")
    share.send(workspace.run_sh)
    share.remove(workspace.root)
    assert list(azure.share.iterdir()) == []
    share.remove(workspace.root)  # a removal of a missing folder raises no error
    share.send(workspace.run_sh)
    (azure.share / "EXPT" / "run.sh").unlink()
    (azure.share / "EXPT").rmdir()
    share.send(workspace.run_sh)
    assert (azure.share / "EXPT" / "run.sh").read_text() == "echo\n"


# ---- files that keepers write


def test_reading_keeper_files_in_ranges_gives_the_same_result_as_reading_a_mount(azure, share, workspace):
    there = Workspace(azure.share / "EXPT").attempt(KEY)
    files, mounted = SharedFiles(workspace, share), SharedFiles(Workspace(azure.share / "EXPT"))
    assert files.find_attempts("trial", SIGNER).newest == []
    assert not files.see_attempt(KEY, {Stream.METRICS: 0}, SIGNER).has_started
    there.stream(Stream.METRICS).parent.mkdir(parents=True)
    there.output.mkdir()
    there.attempt_json.write_bytes(AttemptDocument("EXPT", "job", KEY, 1.0).to_bytes(TOKEN))
    there.stream(Stream.METRICS).write_bytes(b"metrics" * 50_000)
    there.stream(Stream.KEEPER).write_bytes(b"it runs\n")
    there.stream(Stream.STDERR).write_bytes(b"")
    looks = [
        ({Stream.METRICS: 0, Stream.STDOUT: 0, Stream.STDERR: 0}, False),
        ({Stream.METRICS: 262_144, Stream.KEEPER: 3}, False),
        ({Stream.METRICS: 350_000}, False),
        ({Stream.METRICS: 999_999}, True),
    ]
    for ended in (False, True):
        if ended:
            end = TrialEnded(KEY, ExitReason.SUCCEEDED, 0, 1.0, 2.0, {Stream.METRICS: 349_999})
            there.exit_json.write_bytes(exit_to_bytes(end, TOKEN))
        found = files.find_attempts("trial", SIGNER)
        assert found == mounted.find_attempts("trial", SIGNER)
        assert (found.newest, found.rejected) == ([KEY], ())
        for offsets, has_ended in looks:
            seen = files.see_attempt(KEY, offsets, SIGNER, has_ended=has_ended)
            assert seen == mounted.see_attempt(KEY, offsets, SIGNER, has_ended=has_ended)
    assert not any(
        call.startswith(f"GET nni/EXPT/trials/trial/attempts/{KEY.attempt_id}/worker-0/output/stderr?")
        for call in azure.asked
    )
    assert not workspace.trial("trial").path.exists(), "no local copy must exist"


def test_fetch_downloads_new_bytes_of_a_log_but_no_zeros_in_place_of_unsent_bytes(azure, share, workspace):
    files, there = SharedFiles(workspace, share), Workspace(azure.share / "EXPT").attempt(KEY)
    here = workspace.attempt(KEY).stream(Stream.STDOUT)
    files.fetch("trial", Stream.STDOUT)
    there.output.mkdir(parents=True)
    files.fetch("trial", Stream.STDOUT)
    assert not here.exists()
    # Azure returns zeros for bytes that the node has not sent yet, so fetch() must not download these zeros.
    for written, brought in ((b"one\n" + bytes(8), b"one\n"), (b"one\ntwo\n", b"one\ntwo\n")):
        there.stream(Stream.STDOUT).write_bytes(written)
        files.fetch("trial", Stream.STDOUT)
        assert here.read_bytes() == brought
    # With a mount instead of the share's API, fetch() downloads nothing.
    SharedFiles(workspace).fetch("trial", Stream.STDERR)


def test_a_log_fetched_by_two_callers_at_the_same_time_is_complete_and_not_duplicated(
    azure, share, workspace
):
    there = Workspace(azure.share / "EXPT").attempt(KEY).stream(Stream.STDOUT)
    there.parent.mkdir(parents=True)
    content = bytes(range(1, 250)) * 10_000  # One read returns only a part of these bytes.
    there.write_bytes(content)

    class Slow(AzureShare):
        def __init__(self):
            self.others = 2

        def folders_in(self, path):
            return share.folders_in(path)

        def read(self, path, offset, longest):
            data = share.read(path, offset, longest)
            if self.others:
                self.others -= 1
                # This is the second caller: it fetches the log during the fetch of the first caller.
                SharedFiles(workspace, self).fetch("trial", Stream.STDOUT)
            return data

    SharedFiles(workspace, Slow()).fetch("trial", Stream.STDOUT)
    assert workspace.attempt(KEY).stream(Stream.STDOUT).read_bytes() == content


# ---- errors


def test_a_failed_upload_is_retried(azure, share, workspace):
    workspace.run_sh.write_text("echo\n")
    azure.fails_with = [(503, "ServerBusy"), (0, "")]
    share.send(workspace.run_sh)
    assert (azure.share / "EXPT" / "run.sh").read_text() == "echo\n"


def test_an_upload_is_retried_while_a_keeper_has_the_file_open(azure, share, workspace):
    workspace.manager_json.write_text("[]\n")
    share.send(workspace.manager_json)
    workspace.manager_json.write_text("{}\n")
    azure.fails_with = [(409, "SharingViolation"), (409, "DeletePending")]
    share.send(workspace.manager_json)
    assert (azure.share / "EXPT" / "manager.json").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("fault", "tries", "told"),
    [
        ((500, "InternalError"), 3, "it answers 500 InternalError; check the network"),
        ((403, "AuthorizationFailure"), 1, "allow this machine's address in the firewall"),
        ((413, "ShareSizeLimitReached"), 1, "raise its quota"),
    ],
)
def test_an_upload_raises_an_error_with_cause_and_remedy_if_it_keeps_failing(
    azure, share, workspace, fault, tries, told
):
    workspace.run_sh.write_text("echo\n")
    share.send(workspace.run_sh)
    before = len(azure.writes())
    azure.refuses = fault
    with pytest.raises(
        StorageUnavailable, match=r"cannot upload EXPT/run\.sh to the share nni of storage account mystorage"
    ) as raised:
        share.send(workspace.run_sh)
    assert told in str(raised.value)
    assert len(azure.writes()) == before + tries


def test_the_number_of_upload_retries_comes_from_the_experiment_file(azure, workspace):
    again = AzureStorage(ACCOUNT, SHARE, VAULT, SECRET, upload_tries_again=4)
    with contextlib.closing(AzureShare(again, workspace.root)) as share:
        assert share._retry_policy.tries == 5


def test_a_changed_account_key_is_read_again_from_the_vault_and_sent_to_jobs(azure, share, workspace):
    workspace.run_sh.write_text("echo\n")
    azure.key = azure.vault_key = new_key("another")
    share.send(workspace.run_sh)
    (secret,) = share.secrets()
    assert secret.texts == {"azurestorageaccountname": ACCOUNT, "azurestorageaccountkey": azure.key}


def test_the_error_for_an_outdated_or_unreadable_vault_key_contains_no_secret(
    azure, share, workspace, caplog
):
    caplog.set_level(logging.DEBUG)
    workspace.run_sh.write_text("echo\n")
    azure.key = new_key("second")
    with pytest.raises(StorageUnavailable, match="store the account's current key in the vault") as raised:
        share.send(workspace.run_sh)
    azure.is_authenticated = False
    with pytest.raises(StorageUnavailable, match="may not read secret storage-key of the vault my-vault"):
        share.send(workspace.run_sh)
    told = f"{raised.value} {share!r} {share.secrets()!r} {caplog.text}"
    for secret in (
        azure.vault_key,
        base64.b64decode(azure.vault_key).hex(),
        azure.environ["AZURE_CLIENT_SECRET"],
    ):
        assert secret not in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"is_authenticated": False}, "ask the vault's owner for the role Key Vault Secrets User"),
        ({"vault_key": "no key"}, "store one of the account's two keys there"),
        ({"vault_key": ""}, "store one of the account's two keys there"),
    ],
)
def test_an_unreadable_or_malformed_account_key_causes_an_error_with_a_remedy(azure, workspace, change, told):
    for name, value in change.items():
        setattr(azure, name, value)
    with pytest.raises(UserError, match="cannot read the key of storage account mystorage") as raised:
        AzureShare(STORAGE, workspace.root, QUICK)
    assert told in str(raised.value)


def test_a_refused_azure_login_raises_an_error_with_the_error_code_of_azure(azure, workspace, monkeypatch):
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "wrong-s3cret")
    with pytest.raises(UserError, match=r"AADSTS7000215.*az login") as raised:
        AzureShare(STORAGE, workspace.root, QUICK)
    assert "wrong-s3cret" not in str(raised.value)


def test_the_error_for_a_missing_vault_secret_names_the_config_key_to_correct(azure, workspace):
    with pytest.raises(
        UserError, match="secret other of the vault my-vault does not exist; correct keyVault"
    ):
        AzureShare(AzureStorage(ACCOUNT, SHARE, VAULT, "other"), workspace.root, QUICK)


def test_an_unreachable_vault_is_a_retryable_error(azure, workspace):
    with pytest.raises(StorageUnavailable, match=r"check the network and keyVault\.vaultName"):
        AzureShare(AzureStorage(ACCOUNT, SHARE, "elsewhere", SECRET), workspace.root, QUICK)


def test_the_check_of_a_share_makes_one_api_call_and_raises_if_the_share_is_unreachable(azure, share):
    share.check()
    assert azure.asked == ["GET nni?restype=share"]
    azure.key = new_key("second")
    with pytest.raises(StorageUnavailable, match=f"cannot reach the share nni of storage account {ACCOUNT}"):
        share.check()
    assert FILE_HOST.startswith(ACCOUNT)
