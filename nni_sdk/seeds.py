"""Seeds the random number generators of training code: `nni.seed_everything()`."""

import os
import sys

from nni_sdk.errors import SeedInvalid


def seed_everything(seed: "int | None" = None) -> int:
    """Seed `random`, and numpy and torch if they are imported; return the seed.

    `seed` None: the seed of this trial, `NNI_SEED`, which is the same for all attempts; 0 outside an experiment. Call this after
    the imports.

    Raises:
        SeedInvalid: the seed is not a whole number.
    """
    import random
    from operator import index

    try:
        number = int(os.environ.get("NNI_SEED") or 0) if seed is None else index(seed)
    except TypeError as error:
        raise SeedInvalid(
            f"cannot use the seed {seed!r}: it is not a whole number; pass an int, or None for the seed of this trial"
        ) from error
    random.seed(number)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(number % 2**32)
    if torch is not None:
        torch.manual_seed(number)  # of all devices
    return number
