"""A manager whose jobs nobody runs and whose tuner gives everybody the same: started as `python -m nni_manager` is.

All the rest is the manager's own process. Its keepers are doubles, see `keeper_doubles`.
"""

import sys
from pathlib import Path

# The shared helper lies with the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from void_service import Void

from nni_manager import __main__ as manager
from nni_manager import services
from nni_manager.tuner.base import Suggestion, Tuner


class _SameForAll(Tuner):
    """What a tuner takes of the processor is not the manager's."""

    def ask(self, trial_key):
        return Suggestion({"x": 0.5}, {})

    def tell(self, trial_key, value):
        pass

    def restore(self, trials):
        pass


if __name__ == "__main__":
    services.make_service = lambda config, folder: Void
    manager.make_tuner = lambda config: _SameForAll()
    sys.exit(manager.main())
