"""What is done about the storage of jobs beside mounting it in their pods, which `render.volume_of` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trial_keeper.settings import KeeperSettings


@dataclass(frozen=True, slots=True)
class SecretContent:
    """A secret that a job's resource owns, named after that: the name itself, and `suffix`. `kind` is its type."""

    suffix: str
    kind: str
    texts: Mapping[str, str] = field(repr=False)


class SharedStorage:
    """A storage that this machine has mounted as pods have: what the manager writes is there for them already.

    One that is not extends this. Used from several threads at once.
    """

    def secrets(self) -> tuple[SecretContent, ...]:
        """What pods need to know to mount it."""
        return ()

    def hand_over(self, settings: KeeperSettings) -> None:
        """Bring there what the job's keepers will read, before the job is made. May take its time; `settings` are the manager's.

        Raises:
            UserMistake, TryAgain: it cannot be brought; no job is made then, until a later try.
        """

    def close(self) -> None:
        """Let go of it."""
