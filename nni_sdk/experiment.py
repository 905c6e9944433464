"""The Python Experiment API under the name that replacing `nni` by `nni_sdk` yields. It is a part of the manager."""

import sys

from nni_sdk.aliases import experiment_module

sys.modules[__name__] = experiment_module()
