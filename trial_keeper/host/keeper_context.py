"""What the owners of a keeper's state share: its core, its log, and its link once there is one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trial_keeper.core.events import Event
from trial_keeper.core.keeper import Keeper
from trial_keeper.host.keeper_log import KeeperLog
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.workspace import Workspace

if TYPE_CHECKING:
    from trial_keeper.host.link import ManagerLink


@dataclass(slots=True)
class KeeperContext:
    """`handle` passes an event to the core and performs the effects before it returns. `task`: this task of the job."""

    settings: KeeperSettings
    workspace: Workspace
    task: str
    core: Keeper
    log: KeeperLog
    handle: Callable[[Event], None]
    link: "ManagerLink" = field(init=False)
    """Set when the event loop runs: a trial starts before gRPC is imported."""
    is_in_loop: bool = False
