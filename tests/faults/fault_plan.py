"""The faults of one run and their times, which depend only on a seed.

Faults of the same target (such as the manager) never overlap; faults of different targets may overlap. The first two kinds of a
plan are taken from the list of all kinds in order, so that a few consecutive seeds cover every kind. All other kinds are random.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Need(Enum):
    """What a machine must have for a fault, in the words of the reports."""

    ROOT = "root"
    NETWORKS = "network namespaces and iptables"
    FUSE = "FUSE, libfuse and mfusepy"
    CLOCK = "gcc"
    NOTHING = "nothing"


class Kind(Enum):
    """The kinds of faults."""

    MANAGER_KILLED = "manager killed"
    LINK_DOWN = "link down"
    MANAGER_STOPPED = "manager stopped"
    STORAGE_SLOW = "storage slow"
    KEEPER_KILLED = "keeper killed"
    LINK_SLOW = "link slow"
    TRIAL_KILLED = "trial killed"
    MANAGER_DISK_FULL = "manager's disk full"
    KEEPER_STOPPED = "keeper stopped"
    LINK_BROKEN = "link half open"
    WORKSPACE_FULL = "workspace full"
    MANAGER_MOVED = "manager moved"
    LINK_LOSSY = "link lossy"
    STORAGE_STALE = "storage stale"
    TRIAL_STOPPED = "trial stopped"
    LINK_RESET = "link reset"
    MANAGER_CLOCK = "manager's clock stepped"
    WORKSPACE_READ_ONLY = "workspace read-only"
    JOBS_CLOCK = "jobs' clock stepped"
    MANAGER_ENDED = "manager told to end"
    ATTEMPT_FORGED = "attempt forged"
    STOP_ON_FULL_DISK = "stop on a full disk"
    GUARD_STOPPED = "guard stopped"
    STATE_TORN = "state file torn"
    ATTEMPT_REMOVED = "attempt removed"
    STOP_WITH_FROZEN_KEEPER = "stop with a frozen keeper"
    STOP_WITH_FROZEN_GUARD = "stop with a frozen guard"
    METRICS_APPENDED = "metrics appended"
    SPECIAL_FILES = "special files"
    KEEPER_KILLED_AT_NOTICE = "keeper killed at a stop notice"
    MANAGER_KILLED_AT_NOTICE = "manager killed at a stop notice"
    KEEPER_KILLED_BEFORE_CONTENT = "keeper killed before a checkpoint's rename"
    KEEPER_KILLED_BEFORE_MANIFEST = "keeper killed before a manifest's rename"
    KEEPER_KILLED_BEFORE_SIGNATURE = "keeper killed after a manifest's rename"
    KEEPER_KILLED_AFTER_SIGNATURE = "keeper killed after a checkpoint's signature"
    JOB_PREEMPTED = "job preempted"


@dataclass(frozen=True, slots=True)
class _Sort:
    """The durations of one kind of fault.

    Faults with the same target (`thing`) never overlap. `longest_short_s` applies to short plans, `longest_s` to long plans. 0
    means that the fault has no duration.
    """

    thing: str
    need: Need
    shortest_s: float
    longest_short_s: float
    longest_s: float


SORTS: dict[Kind, _Sort] = {
    Kind.MANAGER_KILLED: _Sort("manager", Need.NOTHING, 0.1, 1, 30),
    Kind.MANAGER_ENDED: _Sort("manager", Need.NOTHING, 0.1, 1, 10),
    Kind.MANAGER_MOVED: _Sort("manager", Need.NOTHING, 0.1, 1, 10),
    Kind.MANAGER_STOPPED: _Sort("manager", Need.NOTHING, 0.2, 2, 40),
    Kind.MANAGER_DISK_FULL: _Sort("manager's disk", Need.ROOT, 0.5, 2, 20),
    Kind.MANAGER_CLOCK: _Sort("manager's clock", Need.CLOCK, 0, 0, 0),
    Kind.KEEPER_KILLED: _Sort("keeper", Need.NOTHING, 0, 0, 0),
    Kind.KEEPER_STOPPED: _Sort("keeper", Need.NOTHING, 0.2, 2, 40),
    Kind.TRIAL_KILLED: _Sort("trial", Need.NOTHING, 0, 0, 0),
    Kind.TRIAL_STOPPED: _Sort("trial", Need.NOTHING, 0.2, 2, 20),
    Kind.LINK_DOWN: _Sort("link", Need.NETWORKS, 0.1, 2, 120),
    Kind.LINK_LOSSY: _Sort("link", Need.NETWORKS, 1, 3, 30),
    Kind.LINK_SLOW: _Sort("road", Need.NOTHING, 1, 3, 30),
    Kind.LINK_BROKEN: _Sort("road", Need.NOTHING, 0, 0, 0),
    Kind.LINK_RESET: _Sort("road", Need.NOTHING, 0, 0, 0),
    Kind.WORKSPACE_FULL: _Sort("workspace", Need.ROOT, 0.5, 2, 20),
    Kind.WORKSPACE_READ_ONLY: _Sort("workspace", Need.ROOT, 0.5, 2, 20),
    Kind.STORAGE_SLOW: _Sort("storage", Need.FUSE, 0.5, 2, 20),
    Kind.STORAGE_STALE: _Sort("storage", Need.FUSE, 2, 3, 20),
    Kind.JOBS_CLOCK: _Sort("jobs' clock", Need.CLOCK, 0, 0, 0),
    # The suite also blocks the keepers' link to the manager, if it can, while another user forges attempts or puts special files.
    Kind.ATTEMPT_FORGED: _Sort("link", Need.NOTHING, 1, 3, 60),
    Kind.SPECIAL_FILES: _Sort("link", Need.NOTHING, 1, 3, 60),
    Kind.METRICS_APPENDED: _Sort("attempts", Need.ROOT, 0, 0, 0),
    Kind.ATTEMPT_REMOVED: _Sort("attempts", Need.NOTHING, 0, 0, 0),
    Kind.STATE_TORN: _Sort("manager", Need.NOTHING, 0.1, 1, 10),
    Kind.GUARD_STOPPED: _Sort("guard", Need.NOTHING, 0.2, 2, 40),
    Kind.STOP_ON_FULL_DISK: _Sort("manager", Need.ROOT, 0.5, 2, 10),
    Kind.STOP_WITH_FROZEN_KEEPER: _Sort("manager", Need.NOTHING, 0.5, 2, 10),
    Kind.STOP_WITH_FROZEN_GUARD: _Sort("manager", Need.NOTHING, 0.5, 2, 10),
    Kind.KEEPER_KILLED_AT_NOTICE: _Sort("keeper", Need.NOTHING, 0, 0, 0),
    Kind.MANAGER_KILLED_AT_NOTICE: _Sort("manager", Need.NOTHING, 0.1, 1, 30),
    Kind.KEEPER_KILLED_BEFORE_CONTENT: _Sort("keeper", Need.NOTHING, 0, 0, 0),
    Kind.KEEPER_KILLED_BEFORE_MANIFEST: _Sort("keeper", Need.NOTHING, 0, 0, 0),
    Kind.KEEPER_KILLED_BEFORE_SIGNATURE: _Sort("keeper", Need.NOTHING, 0, 0, 0),
    Kind.KEEPER_KILLED_AFTER_SIGNATURE: _Sort("keeper", Need.NOTHING, 0, 0, 0),
    Kind.JOB_PREEMPTED: _Sort("keeper", Need.NOTHING, 0, 0, 0),
}
STOPS = frozenset({Kind.STOP_ON_FULL_DISK, Kind.STOP_WITH_FROZEN_KEEPER, Kind.STOP_WITH_FROZEN_GUARD})
"""These faults last until the experiment is stopped, and must not prevent the stop. After the stop the experiment is resumed."""
IN_CHECKPOINTS = {
    Kind.KEEPER_KILLED_BEFORE_CONTENT: "content",
    Kind.KEEPER_KILLED_BEFORE_MANIFEST: "manifest",
    Kind.KEEPER_KILLED_BEFORE_SIGNATURE: "named",
    Kind.KEEPER_KILLED_AFTER_SIGNATURE: "named",
}
"""For each fault, the point inside `save_checkpoint` where the trial waits while its keeper is killed: see fault_train.py."""
NEEDS_ROAD = frozenset({Kind.LINK_SLOW, Kind.LINK_BROKEN, Kind.LINK_RESET})
"""Faults that the proxy implements."""

LOSS_SHARE = 0.05
DELAY_S = 0.2
SLOW_STORAGE_S = 0.02
STALE_STORAGE_S = 3.0
"""The minimum time for which NFS clients cache attributes (acregmin of nfs(5))."""
_CLOCK_STEPS_S = (-86_400, -3_600, -90, 90, 3_600, 86_400)
_FEWEST, _MOST = 3, 8
_SIDES = ("manager", "jobs")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `at_s` seconds after the first trials report. `pick`, from 0 to 1, chooses among the possible targets."""

    at_s: float
    kind: Kind
    lasts_s: float
    pick: float
    side: str = ""
    step_s: int = 0

    @property
    def until_s(self) -> float:
        return self.at_s + self.lasts_s

    def __str__(self) -> str:
        how_long = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        side = f", as seen by the {self.side}" if self.side else ""
        step = f" by {self.step_s:+d} s" if self.step_s else ""
        return f"{self.at_s:6.1f} s  {self.kind.value}{how_long}{step}{side}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults of one run. `left_out`: kinds that this machine cannot run, and the capability that each kind needs."""

    seed: int
    is_short: bool
    reuses_jobs: bool
    faults: tuple[Fault, ...]
    left_out: tuple[tuple[Kind, Need], ...]
    among: tuple[Kind, ...] = tuple(Kind)
    """The kinds from which the plan was drawn."""

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(fault.kind for fault in self.faults)

    @property
    def has_road(self) -> bool:
        """Whether a proxy is between keepers and manager."""
        return bool(self.kinds & NEEDS_ROAD)

    @property
    def saves_checkpoints(self) -> bool:
        """Whether trials save checkpoints. Such trials are retried when their keeper is killed."""
        return bool(self.kinds & {*IN_CHECKPOINTS, Kind.JOB_PREEMPTED})

    @property
    def has_far_storage(self) -> bool:
        return any(SORTS[kind].need is Need.FUSE for kind in self.kinds)

    @property
    def steps_clocks(self) -> bool:
        return any(SORTS[kind].need is Need.CLOCK for kind in self.kinds)

    def lines(self) -> list[str]:
        """The plan as text."""
        jobs = "jobs are reused" if self.reuses_jobs else "one job for each trial"
        jobs += ", trials save checkpoints" if self.saves_checkpoints else ""
        left_out = [f"left out, needs {need.value}: {kind.value}" for kind, need in self.left_out]
        return [
            f"seed {self.seed}{', short' if self.is_short else ''}: {jobs}",
            *map(str, self.faults),
            *left_out,
        ]


def kinds_named(words: str) -> tuple[Kind, ...]:
    """The kinds whose names contain one of the comma-separated words.

    Raises:
        ValueError: no name contains one of the words.
    """
    named = [[kind for kind in Kind if word.strip() in kind.value] for word in words.split(",")]
    if not all(named):
        raise ValueError(
            f"cannot find {words!r} among the kinds of faults: {', '.join(k.value for k in Kind)}"
        )
    return tuple(kind for kind in Kind if any(kind in group for group in named))


def plan_of(
    seed: int,
    *,
    is_short: bool,
    missing: frozenset[Need] = frozenset(),
    kinds: Sequence[Kind] = tuple(Kind),
) -> Plan:
    """The plan of a seed, without the faults that need a missing capability.

    All other faults stay the same. `missing`: the capabilities that the machine lacks. `kinds`: the kinds to draw from.
    """
    dice = random.Random(seed)
    first = 2 * (seed - 1)
    wanted = [kinds[first % len(kinds)], kinds[(first + 1) % len(kinds)]]
    wanted += dice.choices(kinds, k=dice.randint(_FEWEST, _MOST) - len(wanted))
    horizon_s = 4.0 if is_short else 20.0
    free_at_s: dict[str, float] = {}
    faults = []
    for kind in wanted:
        sort = SORTS[kind]
        longest_s = sort.longest_short_s if is_short else sort.longest_s
        # The duration is log-uniform: half of the durations are below the geometric mean.
        lasts_s = sort.shortest_s * (longest_s / sort.shortest_s) ** dice.random() if sort.shortest_s else 0.0
        # Between two faults of one target there is a pause of half a second, so that each fault has an effect.
        at_s = max(dice.uniform(0.2, horizon_s), free_at_s.get(sort.thing, 0.0) + 0.5)
        free_at_s[sort.thing] = at_s + lasts_s
        side = (
            dice.choice(_SIDES)
            if sort.thing in ("workspace", "storage") and kind is not Kind.WORKSPACE_FULL
            else ""
        )
        step_s = dice.choice(_CLOCK_STEPS_S) if sort.need is Need.CLOCK else 0
        faults.append(Fault(round(at_s, 2), kind, round(lasts_s, 2), dice.random(), side, step_s))
    faults.sort(key=lambda fault: fault.at_s)
    return Plan(
        seed,
        is_short,
        bool(seed % 2),
        tuple(fault for fault in faults if SORTS[fault.kind].need not in missing),
        tuple((fault.kind, SORTS[fault.kind].need) for fault in faults if SORTS[fault.kind].need in missing),
        tuple(kinds),
    )
