"""What ran: the code of an experiment, and the environment of an attempt."""

from collections.abc import Sequence

from trial_keeper.frozen_dataclass import dataclass

PROVENANCE = ("gitCommit", "isDirty", "codeDigest", "host", "node", "python", "packages")
"""The keys of what ran, in a record of an export that has it."""


@dataclass(frozen=True, slots=True)
class CodeVersion:
    """The training code since a manager's start.

    `since_s`: seconds since the epoch. `digest`: of the content of the code folder, as in the name of its snapshot; empty if the
    folder is too large or unreadable. `git_commit`: None outside a repository, and without git. `is_dirty`: True if the code
    folder differs from the commit, or has files that git neither tracks nor ignores.
    """

    since_s: float
    digest: str
    git_commit: str | None = None
    is_dirty: bool | None = None

    def is_same(self, other: "CodeVersion") -> bool:
        """True if both describe the same code."""
        mine = self.digest, self.git_commit, self.is_dirty
        return mine == (other.digest, other.git_commit, other.is_dirty)


def code_at(versions: Sequence[CodeVersion], at_s: float | None) -> CodeVersion | None:
    """The code at a time, or the newest without one; None: nothing is recorded. `versions` are in the order of time."""
    if at_s is None:
        return versions[-1] if versions else None
    return next((each for each in reversed(versions) if each.since_s <= at_s), None)


@dataclass(frozen=True, slots=True)
class AttemptEnvironment:
    """Where and with what one attempt of a task ran; a text is empty if unknown. `packages`: the digest of their list."""

    attempt: int
    task: str
    host: str
    node: str
    python: str
    packages: str
