"""The part of a stored experiment that describes its platform."""

from dataclasses import dataclass

from nni_manager.config.cluster import ClusterConfig


@dataclass(frozen=True, slots=True)
class SECTION(ClusterConfig):
    """The niceness of keepers and trials; see nice(1)."""

    niceness: int
