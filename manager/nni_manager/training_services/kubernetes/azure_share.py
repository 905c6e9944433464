"""Azure Files: access to the share that pods mount, with the key of its account.

A file is uploaded under a temporary name and renamed, because a partial upload appears in its full size, filled with zeros. A
key that the account rejects is reloaded once from the vault, since keys are rotated there.

Source: Azure Files REST API (Create File, Put Range, Rename File, Get File), and its error codes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from azure.core.exceptions import AzureError, HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.storage.fileshare import ShareClient

from nni_manager.errors import NniManagerError
from nni_manager.training_services.kubernetes.azure_vault import error_text, read_key
from nni_manager.training_services.kubernetes.render import SecretContent, azure_secret
from nni_manager.training_services.kubernetes.section import AzureStorage
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from nni_manager.training_services.share import Share, StorageUnavailable

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_TRANSIENT = (408, 429, 500, 502, 503, 504)
# A client that mounts the share has the file open, e.g. a keeper that reads the file being replaced.
_IN_USE = frozenset({"SharingViolation", "FileLockConflict", "ClientCacheFlushDelay", "DeletePending"})
_REMEDIES = {
    "AuthenticationFailed": "store the account's current key in the vault",
    "AuthorizationFailure": "allow this machine's address in the firewall of the storage account",
    "KeyBasedAuthenticationNotPermitted": "allow access with keys in the storage account",
    "ShareSizeLimitReached": "delete unneeded files from the share, or raise its quota",
}


class AzureShare(Share):
    """The share of one experiment. The content of `root`, the local workspace, is in a folder of the same name."""

    def __init__(
        self, storage: AzureStorage, root: Path, retry_policy: ClientRetryPolicy | None = None
    ) -> None:
        """Read the key. `retry_policy` defaults to as many upload retries as the experiment file allows.

        Raises:
            UserError, StorageUnavailable: the key cannot be read.
        """
        self._storage, self._root = storage, root
        self._retry_policy = retry_policy or ClientRetryPolicy(tries=1 + storage.upload_tries_again)
        self._lock = threading.Lock()
        self._key = read_key(storage, self._retry_policy)
        self._client = self._client_with(self._key)
        self._made: set[str] = set()
        """Folders known to exist."""
        self._is_closed = threading.Event()

    def secrets(self) -> tuple[SecretContent, ...]:
        """Returns the secrets that pods currently need to mount the share: the account and its current key."""
        return (azure_secret(self._storage.account, self._key),)

    def check(self) -> None:
        """Check that the account accepts the key. The share itself need not exist yet.

        Raises:
            StorageUnavailable: the call failed.
        """

        def get_properties(client: Any) -> None:
            with contextlib.suppress(ResourceNotFoundError):  # `send` creates the share
                client.get_share_properties()

        self._call(f"reach the share {self._storage.share}", get_properties)

    def send(self, path: Path, *, is_fixed: bool = False) -> None:
        """See `Share`."""
        share_path = self._share_path(path)

        def upload(client: Any) -> None:
            try:
                if path.is_dir():
                    self._make(client, share_path)
                    return
                folder, _, name = share_path.rpartition("/")
                self._make(client, folder)
                size = path.stat().st_size
                file = client.get_directory_client(folder).get_file_client(f".{name}.new")
                if is_fixed and self._has(client, share_path, size):
                    return
                with path.open("rb") as content:
                    file.upload_file(content, length=size)
                file.rename_file(share_path, overwrite=True)
            except ResourceNotFoundError:
                # Another process removed a parent folder; the next try creates it again.
                self._made.clear()
                raise

        self._call(f"upload {share_path} to the share {self._storage.share}", upload)

    def read(self, path: Path, offset: int, longest: int) -> bytes:
        """See `Share`."""
        share_path = self._share_path(path)

        def download(client: Any) -> bytes:
            try:
                content: bytes = (
                    client.get_file_client(share_path).download_file(offset=offset, length=longest).readall()
                )
            except ResourceNotFoundError:
                return b""
            except HttpResponseError as error:
                if error.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b""  # the offset is at or beyond the end
                raise
            return content

        return self._call(f"read {share_path} on the share {self._storage.share}", download)

    def folders_in(self, path: Path) -> list[str]:
        """See `Share`."""
        share_path = self._share_path(path)

        def names(client: Any) -> list[str]:
            try:
                entries = list(client.list_directories_and_files(share_path))
            except ResourceNotFoundError:
                return []
            return [entry["name"] for entry in entries if entry["is_directory"]]

        return self._call(f"list {share_path} on the share {self._storage.share}", names)

    def remove(self, path: Path) -> None:
        """See `Share`."""
        share_path = self._share_path(path)

        def clear(client: Any, share_path: str) -> None:
            folder = client.get_directory_client(share_path)
            for entry in list(folder.list_directories_and_files()):
                if entry["is_directory"]:
                    clear(client, f"{share_path}/{entry['name']}")
                else:
                    folder.delete_file(entry["name"])
            folder.delete_directory()

        def remove_all(client: Any) -> None:
            self._made.clear()
            with contextlib.suppress(ResourceNotFoundError):  # already removed
                clear(client, share_path)

        self._call(f"remove {share_path} from the share {self._storage.share}", remove_all)

    def close(self) -> None:
        """End waits between tries, and close the connections."""
        self._is_closed.set()
        self._client.close()

    # ---- inside

    def _share_path(self, path: Path) -> str:
        return path.relative_to(self._root.parent).as_posix()

    def _make(self, client: Any, folder: str) -> None:
        """Create the share, the folder and its parents unless they exist."""
        if folder in self._made:
            return
        try:
            if folder:
                self._make(client, folder.rpartition("/")[0])
                client.get_directory_client(folder).create_directory()
            else:
                client.create_share()
        except ResourceExistsError:
            pass
        self._made.add(folder)

    @staticmethod
    def _has(client: Any, share_path: str, size: int) -> bool:
        """True if a file of this size exists."""
        try:
            found = client.get_file_client(share_path).get_file_properties()
        except ResourceNotFoundError:
            return False
        return bool(found.size == size)

    def _client_with(self, key: str) -> Any:
        return ShareClient(
            f"https://{self._storage.account}.file.core.windows.net",
            self._storage.share,
            credential={"account_name": self._storage.account, "account_key": key},
            # Our retry policy decides about retries.
            retry_total=0,
            connection_timeout=self._retry_policy.connect_within_s,
            read_timeout=self._retry_policy.answer_within_s,
        )

    def _call(self, what: str, call: Callable[[Any], Answer]) -> Answer:
        failures, has_new_key = 0, False
        while True:
            key, client = self._key, self._client
            try:
                return call(client)
            except OSError as error:  # from the local file
                raise StorageUnavailable(f"cannot {what}: {error}; check the disk of this machine") from error
            except AzureError as error:
                code = _code_of(error)
                if code == "AuthenticationFailed" and not has_new_key:
                    has_new_key = self._renew(what, key)
                    continue
                failures += 1
                remedy = _REMEDIES.get(code, "check the network and the storage account")
                problem = StorageUnavailable(
                    f"cannot {what} of storage account {self._storage.account}: {error_text(error)}; {remedy}"
                )
                if failures >= self._retry_policy.tries or not _is_transient(error):
                    raise problem from error
                log.info("%s: retrying", problem)
                if self._is_closed.wait(self._retry_policy.delay_s(failures, None)):
                    raise problem from error

    def _renew(self, what: str, refused: str) -> bool:
        """Replace a rejected key by the vault's current key."""
        with self._lock:
            if self._key != refused:
                return True  # another thread has replaced it
            try:
                self._key = read_key(self._storage, self._retry_policy)
            except NniManagerError as error:
                raise StorageUnavailable(
                    f"cannot {what}: Azure rejects the old key, and a new one cannot be read: {error}"
                ) from error
            if self._key != refused:
                log.info("the key of storage account %s has changed", self._storage.account)
                self._client = self._client_with(self._key)  # other threads may still use the old client
        return True


def _is_transient(error: AzureError) -> bool:
    """True if the same call may soon succeed."""
    if not isinstance(error, HttpResponseError) or error.status_code is None:
        return True  # no answer
    is_away = error.status_code in _TRANSIENT or isinstance(error, ResourceNotFoundError)
    return is_away or _code_of(error) in _IN_USE


def _code_of(error: AzureError) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code))
