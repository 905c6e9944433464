"""The seed of a trial's training code."""

from hashlib import sha256


def trial_seed(experiment_id: str, tuner_seed: int | None, sequence_id: int) -> int:
    """A number from 0 to 2**32 - 1: the same for all attempts of a trial.

    With a `tuner_seed`, two experiments give the same seeds to trials with the same number, as to their parameters.
    """
    origin = experiment_id if tuner_seed is None else tuner_seed
    return int.from_bytes(sha256(f"{origin}/{sequence_id}".encode()).digest()[:4], "big")
