"""What is done about the storage of jobs beside mounting it in their pods, which `render.volume_of` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nni_manager.training_services.share import Share

STORAGE_SECRET = "-storage"
"""The suffix of the secret that lets pods mount the storage."""


@dataclass(frozen=True, slots=True)
class SecretContent:
    """A secret that a job's resource owns, named after that: the name itself, and `suffix`. `kind` is its type."""

    suffix: str
    kind: str
    texts: Mapping[str, str] = field(repr=False)


def azure_secret(account: str, key: str) -> SecretContent:
    """What Kubernetes wants to know of an azureFile volume."""
    texts = {"azurestorageaccountname": account, "azurestorageaccountkey": key}
    return SecretContent(STORAGE_SECRET, "Opaque", texts)


class SharedStorage:
    """A storage that this machine has mounted as pods have: what the manager writes is there for them already.

    One that is not extends this. Used from several threads at once.
    """

    @property
    def share(self) -> Share | None:
        """How this machine reaches it in place of a mount; see `TrainingService.share`."""
        return None

    def secrets(self) -> tuple[SecretContent, ...]:
        """What pods need to know to mount it, of this moment."""
        return ()

    def close(self) -> None:
        """Let go of it."""
