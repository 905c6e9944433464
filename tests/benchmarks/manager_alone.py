"""A manager whose jobs nobody runs: started as `python -m nni_manager` is.

All the rest is the manager's own process. Its keepers are doubles, see `keeper_doubles`.
"""

import sys
from pathlib import Path

# The shared helper lies with the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from void_service import Void

from nni_manager import __main__ as manager
from nni_manager import training_service_factory

if __name__ == "__main__":
    training_service_factory.make_service = lambda config, folder: Void
    sys.exit(manager.main())
