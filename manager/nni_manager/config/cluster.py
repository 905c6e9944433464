"""The base of the section of an experiment file that describes a platform and its jobs; each platform has one of its own."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from trial_keeper.frozen_dataclass import dataclass

HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The platform's section of an experiment: its login, its storage and its jobs."""

    @property
    def is_this_machine(self) -> bool:
        """True if jobs are processes of the manager's user on this machine, rather than of a cluster."""
        return False

    @property
    def has_commands(self) -> bool:
        """True if the section has the commands of trials, so that the file's own has no effect."""
        return False

    def trial_gpu_number(self, written: int | None) -> int | None:
        """The number of GPUs of a trial, if the file's `trialGpuNumber` is `written`; None if the jobs decide."""
        return written

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files, besides the experiment file, that may contain secrets."""
        return ()

    @property
    def has_job_file(self) -> bool:
        """True if a file of the user describes the jobs; its text is a part of the section."""
        return False

    @property
    def receiver_of_login(self) -> str:
        """The cluster of another person or host that receives the user's login; empty: none does."""
        return ""

    @property
    def has_unmounted_share(self) -> bool:
        """True if the files of trials are on a share that this machine has not mounted."""
        return False

    def without_secrets(self) -> ClusterConfig:
        """A copy for display. Logins and the text of job descriptions, which may contain logins, are hidden."""
        return self

    def without_login(self) -> ClusterConfig:
        """A copy for archives."""
        return self

    def keys_of_profile(self) -> dict[str, Any]:
        """The keys of the section in NNI's second schema that a profile shows; no logins."""
        return {}

    @classmethod
    def of_stored(cls, fields: dict[str, Any]) -> ClusterConfig:
        """The section with these fields, as `ExperimentSpec.to_json` wrote them.

        Raises:
            ValidationError: a field is missing, or has another type.
        """
        section: ClusterConfig = validated(cls, fields)
        return section


@dataclass(frozen=True, slots=True)
class UnreadSection(ClusterConfig):
    """The stored section of a platform whose package is absent or fails: its experiments are shown, and cannot run."""

    fields: dict[str, Any]

    def without_secrets(self) -> UnreadSection:
        """Any value may be a secret."""
        return UnreadSection(dict.fromkeys(self.fields, HIDDEN))

    def without_login(self) -> UnreadSection:
        """Without any value."""
        return UnreadSection({})


def validated(cls: Any, fields: dict[str, Any]) -> Any:
    """The dataclass with these fields, as JSON has them.

    Raises:
        ValidationError: a field is missing, or has another type.
    """
    return _validator(cls).validate_python(fields)


@cache
def _validator(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def hidden(text: str | None) -> str | None:
    """The placeholder of a secret; None without one."""
    return None if text is None else HIDDEN


def as_json(value: Any) -> Any:
    """A value of a stored experiment that JSON lacks: the fields of a dataclass or a section, or the text of a path."""
    if isinstance(value, BaseModel):
        return dict(value)
    if isinstance(value, UnreadSection):
        return value.fields
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return [type(value).__name__, fields] if getattr(value, "is_stored_with_name", False) else fields
