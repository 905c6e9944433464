"""Handling of the jobs' storage except its mount in pods, which `render.volume_of` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nni_manager.training_services.share import Share

STORAGE_SECRET = "-storage"
"""The suffix of the secret with which pods mount the storage."""


@dataclass(frozen=True, slots=True)
class SecretContent:
    """A secret that a job's resource owns. Its name is that resource's name plus `suffix`; `kind` is its type."""

    suffix: str
    kind: str
    texts: Mapping[str, str] = field(repr=False)


def azure_secret(account: str, key: str) -> SecretContent:
    """Returns the secret that Kubernetes needs for an azureFile volume."""
    texts = {"azurestorageaccountname": account, "azurestorageaccountkey": key}
    return SecretContent(STORAGE_SECRET, "Opaque", texts)


class SharedStorage:
    """Storage that this machine mounts as well, so pods see directly what the manager writes.

    Base class of storage that this machine does not mount. Thread-safe.
    """

    @property
    def share(self) -> Share | None:
        """Access in place of a local mount; see `TrainingService.share`."""
        return None

    def secrets(self) -> tuple[SecretContent, ...]:
        """Returns the secrets that pods currently need to mount it."""
        return ()

    def close(self) -> None:
        """Release connections."""
