"""The settings of a job's keeper. The only reader and writer of the TRIAL_KEEPER_* variables.

The manager creates a `KeeperSettings` and adds `to_environ()` to the job; the keeper parses it with `from_environ()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields

from trial_keeper.errors import SettingsInvalid
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import Stream

PREFIX = "TRIAL_KEEPER_"
SettingValue = str | bool | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """The settings of one job's keeper."""

    experiment_id: str
    job_id: str
    workspace: str
    """The path of the experiment's folder in this container."""
    token: str = field(repr=False)
    """The secret that authenticates the keeper of `job_id` to the manager. Never logged, never passed to the trial."""
    trial_id: str | None = None
    """The trial to run; None if the manager dispatches trials to the job one after another (reuse)."""
    collect_logs: bool = False
    """Replicate stdout, stderr and the keeper's log as well, not only the metrics."""
    relay_output: bool = False
    """Copy the trial's stdout and stderr to the keeper's own, for `kubectl logs` and portals."""
    version_check: bool = True
    mount: str | None = None
    """The mount point of the shared storage in the container, which the keeper waits for. None on the manager's machine."""
    mount_wait_s: float = 60.0
    """How long the keeper waits for the mount. Slow network storage takes up to a minute on a node that starts."""
    grace_s: float = 30.0
    """Time between SIGTERM and SIGKILL. Kubernetes' own default."""
    linger_s: float = 30.0
    """How long a keeper waits after its trial's end for progress of the delivery to the manager. A keeper that never connected
    waits 5 s at most. The files stay in the workspace in any case."""
    idle_timeout_s: float = 600.0
    """How long a reused job's keeper waits for the next trial before it drains. NNI's default: a cluster's idle GPUs are free
    again within ten minutes of a manager's death."""
    max_trials: int = 0
    """A reused job's keeper drains after this many trials; 0: no limit."""
    warm_imports: tuple[str, ...] = ()
    """Modules that a reused job's keeper preloads in its fork server."""
    command: str | None = None
    """This task's command in place of the trial's: tasks of one job may run different commands."""
    role: str | None = None
    """This task's role, on clusters that do not set the role themselves."""

    @property
    def is_reused(self) -> bool:
        """True if the job runs many trials in turn."""
        return self.trial_id is None

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The replicated streams, most urgent first."""
        return tuple(Stream) if self.collect_logs else (Stream.METRICS,)

    def to_environ(self) -> dict[str, str]:
        """Return the variables of these settings; None and empty values are omitted."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            PREFIX + name.upper(): _write(value) for name, value in values.items() if value not in (None, ())
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> KeeperSettings:
        """Parse the variables; others are ignored.

        Raises:
            SettingsInvalid: variables are missing or malformed; the message names all of them.
        """
        values, problems = read_settings(environ)
        if problems:
            raise SettingsInvalid(
                f"cannot read the keeper's settings: {'; '.join(problems)}; do not start a keeper by hand: "
                "create an experiment with `nnictl create --config FILE`"
            )
        return cls(**values)  # type: ignore[arg-type]


def read_settings(environ: Mapping[str, str]) -> tuple[dict[str, SettingValue], list[str]]:
    """Return the valid values by field name, and a problem for each of the others. Defaults are not filled in."""
    values: dict[str, SettingValue] = {}
    problems: list[str] = []
    for entry in fields(KeeperSettings):
        name = PREFIX + entry.name.upper()
        text = environ.get(name)
        if text is None:
            if entry.default is MISSING:
                problems.append(f"{name} is not set")
            continue
        try:
            values[entry.name] = _READERS[str(entry.type)](text)
        except ValueError as error:
            problems.append(f"{name} is {text!r}, {error}")
    return values, problems


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a trial: the container's own, without the keeper's secrets."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def _write(value: SettingValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    if type(value) is int:
        return str(value)
    return value if isinstance(value, str) else repr(float(value))  # type checkers accept an int as a float


def _read_text(text: str) -> str:
    if not text:
        raise ValueError("which is empty")
    return text


def _read_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("not true or false")
    return text == "true"


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise ValueError("not a number of seconds") from error
    if not 0 <= seconds < float("inf"):
        raise ValueError("not a number of seconds of at least 0")
    return seconds


def _read_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("not a whole number of at least 0")
    return int(text)


def _read_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names):
        raise ValueError("not a list of names with commas between them")
    return names


# Annotations are strings here (PEP 563).
_READERS: dict[str, Callable[[str], SettingValue]] = {
    "str": _read_text,
    "str | None": _read_text,
    "int": _read_count,
    "tuple[str, ...]": _read_names,
    "bool": _read_bool,
    "float": _read_seconds,
}
