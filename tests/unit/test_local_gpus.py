"""The assignment of GPUs to jobs on the local platform."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_experiment import made_trial

from nni_manager.engine import serializers
from nni_manager.errors import UserError
from nni_manager.training_services.base import ManagedGpu
from nni_manager.training_services.local.gpus import GpuShares
from nni_manager.training_services.local.section import LocalSection
from trial_keeper.wire.messages import AttemptKey, GpuUsage, Usage


def test_the_least_loaded_gpus_are_assigned_first():
    shares = GpuShares((0, 1, 2), max_jobs_per_gpu=2)
    assert shares.take("a", 2) == (0, 1)
    assert shares.take("b", 1) == (2,)
    assert shares.take("c", 3) == (0, 1, 2)
    assert shares.take("d", 2) is None
    shares.release("a")
    assert shares.take("d", 2) == (0, 1)


def test_gpus_in_use_by_other_programs_are_not_assigned():
    shares = GpuShares((0, 1, 2), max_jobs_per_gpu=2)
    assert shares.take("a", 1, in_use={0}) == (1,)
    # Job a now computes on GPU 1. A second job may share this GPU.
    assert shares.used_by_others({0, 1}) == [0]
    assert shares.take("b", 3, in_use={0, 1}) is None
    assert shares.take("b", 2, in_use={0, 1}) == (1, 2)
    assert shares.take("c", 1, in_use={0, 1, 2}) == (2,)
    assert shares.take("d", 1, in_use={0, 1, 2}) is None
    assert shares.take("d", 1, in_use={1, 2}) == (0,)
    assert shares.used_by_others({5}) == []


def test_the_gpu_view_shows_the_jobs_on_each_gpu_and_whether_other_programs_use_the_gpu():
    shares = GpuShares((0, 1, 2), max_jobs_per_gpu=2)
    shares.take("a", 1, in_use={0})
    shares.take("b", 2, in_use={0})
    busy, shared, own = shares.shown(in_use={0, 1, 2})
    assert (busy.index, busy.job_ids, busy.has_other_programs) == (0, (), True)
    # If a job has a GPU, the driver's data does not show whether other programs use the GPU, too.
    assert (shared.job_ids, shared.has_other_programs) == (("a", "b"), None)
    assert (own.job_ids, own.has_other_programs) == (("b",), None)
    assert shares.shown(in_use={1})[0].has_other_programs is False
    assert shares.shown(in_use=None)[0].has_other_programs is None


def test_the_gpu_view_contains_the_running_trials_of_each_gpu_and_their_latest_usage():
    trials = {"a": [made_trial(1, 0.0)], "b": [made_trial(2, 0.0)]}
    trials["a"][0].run.latest_usage = Usage(
        AttemptKey("00001", "1", "main-0"), 1.0, 0, 0, (GpuUsage(0, 50.0, 7), GpuUsage(1, 90.0, 8))
    )
    experiment = SimpleNamespace(
        jobs=SimpleNamespace(live={"a": "a", "b": "b"}), scheduler=SimpleNamespace(trials_of=trials.get)
    )
    gpus = [ManagedGpu(1, ("a", "ended"), None), ManagedGpu(2, ("b",), None), ManagedGpu(3, (), True)]
    used, unreported, foreign = serializers.gpus_view(SimpleNamespace(experiment=experiment), gpus)
    assert (used["trialIds"], used["jobIds"]) == (["00001"], ["a", "ended"])
    assert (used["utilisationPercent"], used["memoryUsedBytes"]) == (90.0, 8)
    assert (unreported["trialIds"], unreported["utilisationPercent"]) == (["00002"], None)
    assert (foreign["trialIds"], foreign["hasOtherPrograms"]) == ([], True)


def test_the_error_for_too_many_requested_gpus_contains_the_requested_and_the_available_number():
    with pytest.raises(UserError, match=r"gpuNum is 2 and the experiment may use 1"):
        GpuShares.of(LocalSection(), 2, present=(0,))
    with pytest.raises(UserError, match=r"GPU 7 does not exist"):
        GpuShares.of(LocalSection(gpu_indices=(7,)), 1, present=(0, 1))


def test_trials_without_gpus_need_no_gpu_on_the_machine():
    assert GpuShares.of(LocalSection(), 0, present=()).indices == ()
    assert GpuShares.of(LocalSection(gpu_indices=(3,)), None, present=()).indices == (3,)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.frozensets(st.integers(0, 4))), max_size=40),
    st.integers(1, 3),
)
def test_a_gpu_never_exceeds_its_trial_limit_and_a_gpu_with_other_programs_gets_no_trial(moves, most):
    shares = GpuShares((0, 1, 2, 3), most)
    held: dict[str, tuple[int, ...]] = {}
    for job, count, others in moves:
        unused = set(range(4)).difference(*held.values())
        if str(job) in held:
            shares.release(str(job))
            del held[str(job)]
        elif (indices := shares.take(str(job), count, others)) is not None:
            assert len(set(indices)) == count
            assert not unused & others & set(indices)
            held[str(job)] = indices
        load = [sum(index in indices for indices in held.values()) for index in range(4)]
        assert max(load) <= most
