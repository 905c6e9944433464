"""The keeper's host performs each effect of the core."""

import signal
from typing import get_args

from trial_keeper.core.events import Effect
from trial_keeper.host.host import STOP_SIGNALS, Host
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.workspace import Workspace


def test_the_host_has_a_handler_for_every_effect(tmp_path):
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        host = Host(KeeperSettings("exp1", "job1", str(tmp_path), "token"), Workspace(tmp_path), "main", None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert host._performing.keys() == {*get_args(Effect)}
