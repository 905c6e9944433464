"""Seeds the random number generators of training code: `nni.seed_everything()`."""

import os
import sys


def seed_everything(seed: "int | None" = None) -> int:
    """Seed `random`, and numpy and torch if they are imported; return the seed.

    `seed` None: the seed of this trial, `NNI_SEED`, which is the same for all attempts; 0 outside an experiment. Call this after
    the imports.
    """
    import random

    number = int(os.environ.get("NNI_SEED") or 0) if seed is None else seed
    random.seed(number)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(number % 2**32)
    if torch is not None:
        torch.manual_seed(number)  # of all devices
    return number
