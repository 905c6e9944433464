"""A platform's part of an experiment file: its keys, its checks, and the section that is read from it.

Each platform's package has a subclass `FILE` in its module `experiment_file`. Everything has a default that
suits a platform whose keys are spelled alike in both of NNI's schemas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from nni_manager.config.cluster import ClusterConfig
from nni_manager.config.diagnostics import folded
from nni_manager.config.dialect import Keys
from nni_manager.config.experiment_schema import ExperimentKeys
from nni_manager.config.platforms import PLATFORMS
from nni_manager.config.schema import PATHS, Schema, names_of_kind

if TYPE_CHECKING:
    from nni_manager.config.reading import Reading
    from nni_manager.config.translation import Translation


AnySection = TypeVar("AnySection")


class PlatformFile:
    """The platform's part of one file. Class attributes and class methods describe all files of the platform."""

    schema: ClassVar[type[ExperimentKeys]] = ExperimentKeys
    """The schema of a whole file."""
    open_keys: ClassVar[tuple[str, ...]] = ()
    """The keys of mappings whose keys are the user's names."""

    @classmethod
    def is_path(cls, key: str, mapping: Mapping[str, Any]) -> bool:
        """True if the value of this key of a mapping, in any spelling, is a path on this machine."""
        return folded(key) in map(folded, names_of_kind(cls.schema, *PATHS))

    # ---- NNI's first schema

    examples_v1: ClassVar[Mapping[str, str]] = {}
    """The content of mappings of a v1 file in examples, by their last key: that of the section, and others within."""
    example_of_trial: ClassVar[tuple[str, str] | None] = None
    """The key of v2 that examples of v1's `trial` show besides `codeDir`, and its value; None: `command`."""
    examples_of_values_v1: ClassVar[Mapping[Keys, str]] = {}
    """Examples whose notation in v1 does not follow from the names of keys."""
    storage_in_v1: ClassVar[str] = ""
    """Where v1 files have the shared storage, as text for people; empty: the platform has none."""
    hints_v1: ClassVar[Mapping[str, str]] = {}
    """Hints for unknown keys of v1 files for this platform, by dotted path: the reason and the remedy."""
    hints_v1_elsewhere: ClassVar[Mapping[str, str]] = {}
    """Those in v1 files for any platform, about keys of this one."""
    parts_by_kind: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The keys of the section of a v1 file that belong to each kind of its storage."""
    key_of_kind: ClassVar[Keys] = ()
    """The key of v2 that names the kind."""
    why_dropped: ClassVar[Mapping[str, str]] = {}
    """Why v2 lacks a key, by its dotted path in v1."""

    @classmethod
    def kind_in_v1(cls, section: Any) -> str | None:
        """The kind of storage of a v1 section; None without one."""
        return None

    @classmethod
    def convert(cls, raw: dict[str, Any], service: dict[str, Any]) -> None:
        """Change what v2 writes differently, before the keys are dropped that v2 lacks."""

    # ---- NNI's second schema

    aliases: ClassVar[Mapping[Keys, Keys]] = {}
    """Other names of keys in some versions of NNI."""
    hints: ClassVar[Mapping[str, str]] = {}
    """Hints for unknown keys of v2 files for any platform, about keys of this one."""
    reuses_jobs: ClassVar[bool] = True
    """The default of `reuseMode` in v2; that of v1 is false."""
    implicit: ClassVar[frozenset[Keys]] = frozenset()
    """The required keys for which only v2 has a default."""

    @classmethod
    def unused_keys(cls, service: Any) -> frozenset[Keys]:
        """The keys of the platform that this `trainingService` cannot have, because of its other values."""
        return frozenset()

    @classmethod
    def apply_defaults(cls, file: Translation, service: dict[str, Any]) -> None:
        """Set the defaults that only v2 has."""

    # ---- one file

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.service = reading.service

    @property
    def storage(self) -> Path | None:
        """The folder of the shared storage, which may lie in the code folder; None: unknown, or none."""
        return None

    def check(self) -> None:
        """Check what the schema cannot: rules over several keys, and the files and folders that keys name."""

    def cluster(self, file: Any) -> ClusterConfig:
        """The section of a file without diagnostics, an instance of `schema`. By default each field is the key of its name."""
        section: type[ClusterConfig] = PLATFORMS[file.training_service.platform].load("SECTION")
        return self.same_named(section, file.training_service)

    @staticmethod
    def same_named(section: Callable[..., AnySection], keys: Schema, **resolved: Any) -> AnySection:
        """The section with these fields; every other field has the value of the key of the same name."""
        names = inspect.signature(section).parameters.keys() & type(keys).model_fields.keys()
        return section(**{name: getattr(keys, name) for name in names} | resolved)


def file_of(platform: str) -> type[PlatformFile]:
    """A platform's part of experiment files, by its name in v2. Imports only this platform's module."""
    found: type[PlatformFile] = PLATFORMS[platform].load("FILE")
    return found
