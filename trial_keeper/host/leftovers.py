"""Ends the processes that attempts of a killed keeper have left."""

from collections.abc import Collection

from trial_keeper.host.cgroups import TrialCgroup
from trial_keeper.host.process import marked
from trial_keeper.processes import all_pids, end_all, families


def end_marked(sys_dirs: Collection[str], sessions: Collection[int] = ()) -> int:
    """Kill the processes that attempts of a dead keeper have left on this machine, and wait for their end. Returns their number.

    They are found by their environment, by these sessions or one that such a process leads, by the control group of these
    sessions' leaders, and by ancestry. Processes of other users stay, unless they are in the control group.
    """
    groups = [group for session in sessions if (group := TrialCgroup.of(session)) is not None]

    def find() -> set[int]:
        for group in groups:
            group.kill()
        in_groups = (pid for group in groups for pid in group.pids())
        return families([*marked(sys_dirs, all_pids()), *in_groups], sessions)

    ended = end_all(find)
    for group in groups:
        group.remove()
    return ended
