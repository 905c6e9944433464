"""A manager whose jobs do not run, started like `python -m nni_manager`.

Apart from its jobs, it is the real manager process. Its keepers are simulated, see `keeper_doubles`.
"""

import sys
from pathlib import Path

# Make the helper modules of tests/fakes importable.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from void_service import Void

from nni_manager import __main__ as manager
from nni_manager.training_services.local.platform import LocalPlatform

if __name__ == "__main__":
    LocalPlatform.make_service = lambda platform, folder: Void
    sys.exit(manager.main())
