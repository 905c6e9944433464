"""The table of platforms. Everything else finds a platform, its names and its package here.

A package has up to three modules, each imported only for experiments on the platform: `experiment_file` (the keys and their
checks), `section` (what is stored), and `platform` (all that runs).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class PlatformRow:
    """A platform: its names in NNI's second and first schema and for people, and its section of v1 files besides `trial`.

    `stored_as` is the key of its section in stored experiments. `key_of_section` is a key that shows which
    section a line of a v1 file belongs to, if the section's own line is lost.
    """

    name: str
    v1: str
    title: str
    section: str
    stored_as: str
    key_of_section: str | None = None

    def module(self, name: str) -> ModuleType:
        """A module of the platform's package."""
        return importlib.import_module(f"{_PACKAGES}.{self.name}.{name}")


_PACKAGES = "nni_manager.training_services"
PLATFORMS = {
    row.name: row
    for row in (
        PlatformRow("local", "local", "this machine", "localConfig", "local"),
        PlatformRow("openpai", "pai", "OpenPAI", "paiConfig", "pai", "userName"),
        PlatformRow(
            "frameworkcontroller",
            "frameworkcontroller",
            "FrameworkController",
            "frameworkcontrollerConfig",
            "kubernetes",
        ),
        PlatformRow("kubeflow", "kubeflow", "Kubeflow", "kubeflowConfig", "kubernetes", "operator"),
    )
}
"""The platforms, by their names in the second schema."""
BY_V1 = {row.v1: row for row in PLATFORMS.values()}
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
    "remote": UnsupportedPlatform(
        "trials are not started over SSH; run nnictl on that machine with «trainingService.platform: local», or use "
        + _CLUSTERS,
        ("machineList", "remoteConfig"),
    ),
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


def stored_sections() -> set[str]:
    """The keys of the platforms' sections in stored experiments."""
    return {row.stored_as for row in PLATFORMS.values()}
