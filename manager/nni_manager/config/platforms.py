"""The table of platforms. Everything else finds a platform, its names and its package here.

A package has up to three modules, each imported only for experiments on the platform: `experiment_file` (the keys and their
checks), `section` (what is stored), and `platform` (all that runs). An installed distribution declares a
platform of its own as an entry point: its name is the platform's, its value the package.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import lru_cache
from typing import Any, Literal

from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class PlatformRow:
    """A platform: its names in NNI's second and first schema and for people, and its section of v1 files besides `trial`.

    `stored_as` is the key of its section in stored experiments. `key_of_section` is a key that shows which
    section a line of a v1 file belongs to, if the section's own line is lost. `may_lack_section`: a v1 file need not have the
    section. `package` is that of an installed platform, and
    `distribution` the name and version of what installs it; both are empty for a built-in one. `is_absent`: it was installed when
    an experiment was stored, and is not any more.
    """

    name: str
    v1: str
    title: str
    section: str
    stored_as: str
    key_of_section: str | None = None
    may_lack_section: bool = False
    package: str = ""
    distribution: str = ""
    is_absent: bool = False

    def load(self, name: Literal["FILE", "SECTION", "platform"]) -> Any:
        """What the platform's package declares by this name. Imports its module.

        Raises:
            PlatformUnusable: the package of an installed platform is absent, fails, or lacks the name.
        """
        if self.is_absent:
            raise PlatformUnusable(
                f"cannot use platform {self.name}: no package in this Python provides it; install the one that does, "
                "`nnictl trainingservice list` shows all"
            )
        if not self.distribution:
            return getattr(importlib.import_module(f"{_PACKAGES}.{self.name}.{_MODULES[name]}"), name)
        module = f"{self.package}.{_MODULES[name]}"
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:
            raise PlatformUnusable(
                f"cannot use platform {self.name}: {name} of {module}, from {self.distribution}: "
                f"{type(error).__name__}: {error}; update that package, or report this to its authors"
            ) from error


class PlatformUnusable(UserError):
    """cannot use this platform; install or update the package that provides it"""


class _Table(dict[str, PlatformRow]):
    """Rows by name. A lookup finds installed platforms too; iteration gives only the built-in ones."""

    def __missing__(self, name: str) -> PlatformRow:
        found = [row for row in installed_platforms() if row.name == name]
        if not found:
            raise KeyError(name)
        if len(found) > 1:
            providers = " and ".join(row.distribution for row in found)
            raise PlatformUnusable(
                f"cannot choose platform {name}: {providers} provide it; uninstall one of them"
            )
        return found[0]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


ENTRY_POINTS = "trial_keeper.platforms"
"""The group of entry points that declare platforms."""


def installed_platforms() -> tuple[PlatformRow, ...]:
    """The platforms of installed distributions, whose code is not imported. A built-in one of the same name takes precedence."""
    return _installed(tuple((folder, _modified_ns(folder)) for folder in sys.path))


@lru_cache(maxsize=1)
def _installed(_: tuple[tuple[str, int], ...]) -> tuple[PlatformRow, ...]:
    """One lookup reads a file of each distribution, 100 ms if there are many, and an experiment file needs a dozen lookups.

    An installation changes the modification time of a folder on the search path: a running notebook finds the new package.
    """
    from importlib.metadata import entry_points  # 15 ms that no built-in platform needs

    rows = (
        PlatformRow(
            *(each.name, each.name, each.name, f"{each.name}Config", f"{each.name}Config"),
            package=each.module,
            distribution="an unknown package"
            if each.dist is None
            else f"{each.dist.name} {each.dist.version}",
        )
        for each in entry_points(group=ENTRY_POINTS)
    )
    return tuple(sorted(rows, key=lambda row: (row.name, row.distribution)))


def _modified_ns(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:  # a folder of the search path need not exist
        return 0


_PACKAGES = "nni_manager.training_services"
_MODULES = {"FILE": "experiment_file", "SECTION": "section", "platform": "platform"}
PLATFORMS = _Table(
    (row.name, row)
    for row in (
        PlatformRow("local", "local", "this machine", "localConfig", "local", may_lack_section=True),
        PlatformRow("openpai", "pai", "OpenPAI", "paiConfig", "pai", "userName"),
        PlatformRow(
            "frameworkcontroller",
            "frameworkcontroller",
            "FrameworkController",
            "frameworkcontrollerConfig",
            "kubernetes",
        ),
        PlatformRow("kubeflow", "kubeflow", "Kubeflow", "kubeflowConfig", "kubernetes", "operator"),
        PlatformRow("slurm", "slurm", "Slurm", "slurmConfig", "slurm", "partition"),
        PlatformRow("remote", "remote", "machines over SSH", "remoteConfig", "remote", may_lack_section=True),
    )
)
"""The platforms, by their names in the second schema."""
BY_V1 = _Table((row.v1, row) for row in PLATFORMS.values())
"""The platforms, by their names in the first schema, which are those of stored experiments."""
THIS_MACHINE = "local"
"""The platform of files that name no valid one: their other errors are those of a file for this machine."""
NAMES = " or ".join((", ".join([*PLATFORMS][:-1]), [*PLATFORMS][-1]))
"""The names in the second schema, for messages."""
_CLUSTERS = f"a cluster ({', '.join(f'«={name}»' for name in PLATFORMS if name != THIS_MACHINE)})"


@dataclass(frozen=True, slots=True)
class UnsupportedPlatform:
    """A platform of NNI that is not supported: the reason with the remedy, and its sections of v1 files."""

    reason: str
    sections: tuple[str, ...]


UNSUPPORTED = {
    "paiYarn": UnsupportedPlatform(
        "OpenPAI on YARN was discontinued with OpenPAI 0.14; use «trainingService.platform: openpai»",
        ("paiYarnConfig",),
    ),
    "dlts": UnsupportedPlatform(f"DLTS is no longer maintained; use {_CLUSTERS}", ("dltsConfig",)),
    "aml": UnsupportedPlatform(
        f"Azure Machine Learning is not supported; use {_CLUSTERS}, such as Kubernetes on Azure",
        ("amlConfig",),
    ),
    "dlc": UnsupportedPlatform(
        f"Alibaba's DLC is not supported; use {_CLUSTERS}, such as Kubernetes on Alibaba Cloud",
        ("dlcConfig",),
    ),
    "adl": UnsupportedPlatform(
        "AdaptDL is no longer maintained; use «trainingService.platform: kubeflow»", ("adlConfig",)
    ),
    "hybrid": UnsupportedPlatform(
        f"an experiment runs on one platform; use local or {_CLUSTERS}",
        ("hybridConfig", "machineList", "remoteConfig", "paiConfig", "amlConfig", "localConfig"),
    ),
}


def of_stored(name: str) -> PlatformRow:
    """The platform of a stored experiment, by its name in the first schema; its package may not be installed any more."""
    return BY_V1.get(name) or PlatformRow(name, name, name, f"{name}Config", f"{name}Config", is_absent=True)


def stored_sections() -> set[str]:
    """The keys of the built-in platforms' sections in stored experiments."""
    return {row.stored_as for row in PLATFORMS.values()}
