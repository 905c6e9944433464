"""The registry of connected keepers."""

from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.search_budget import Limits
from nni_manager.engine.connected_keepers import ConnectedKeeper, ConnectedKeepers


def test_removing_the_keeper_of_one_task_leaves_the_keepers_of_other_tasks_registered() -> None:
    keepers = ConnectedKeepers(ExperimentCore("TESTEXPT", Limits(1, 1, None, None, 0), MAXIMIZE))
    first, second = (ConnectedKeeper("env-0", task, "0.7.0") for task in ("worker-0", "worker-1"))
    keepers.add(first)
    keepers.add(second)
    assert keepers.remove(first)
    assert [keeper.task for keeper in keepers.seen("env-0")] == ["worker-1"]
    assert not keepers.remove(first)
    assert keepers.remove(second)
    assert len(keepers) == 0
