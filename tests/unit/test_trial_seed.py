"""The seed of a trial, and its use in training code."""

import random
import re

import numpy as np
import pytest

import nni_sdk as nni
from nni_manager.domain.trial_seed import trial_seed
from nni_sdk.errors import SeedInvalid


def test_trial_seeds_are_distinct_and_determined_by_the_tuner_seed():
    seeds = [trial_seed("aaaaaaaa", 7, number) for number in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds == [trial_seed("bbbbbbbb", 7, number) for number in range(100)]
    assert trial_seed("aaaaaaaa", 8, 0) != seeds[0]
    assert (
        trial_seed("aaaaaaaa", None, 0) == trial_seed("aaaaaaaa", None, 0) != trial_seed("bbbbbbbb", None, 0)
    )


@pytest.mark.parametrize(("environ", "given", "expected"), [("5", None, 5), (None, None, 0), ("5", 9, 9)])
def test_the_function_seed_everything_seeds_python_and_numpy(monkeypatch, environ, given, expected):
    monkeypatch.delenv("NNI_SEED", raising=False)
    if environ is not None:
        monkeypatch.setenv("NNI_SEED", environ)
    assert nni.seed_everything(given) == expected
    drawn = random.random(), float(np.random.rand())
    random.seed(expected)
    np.random.seed(expected)
    assert drawn == (random.random(), float(np.random.rand()))


@pytest.mark.parametrize("seed", ["x", "7", 1.5, [1]])
def test_a_seed_that_is_not_a_whole_number_is_refused_before_anything_is_seeded(seed):
    random.seed(3)
    with pytest.raises(
        SeedInvalid, match=f"^cannot use the seed {re.escape(repr(seed))}: it is not a whole number; pass"
    ):
        nni.seed_everything(seed)
    assert random.random() == random.Random(3).random()
    assert nni.seed_everything(np.int64(7)) == 7


def test_the_largest_seed_is_accepted_by_numpy(monkeypatch):
    monkeypatch.setenv("NNI_SEED", str(2**32 - 1))
    assert nni.seed_everything() == 2**32 - 1
