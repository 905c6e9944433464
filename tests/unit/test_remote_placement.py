"""The choice of the machine for a job, and the pending reason of a waiting job."""

from nni_manager.training_services.remote.gpu_query import MachineGpus, parse
from nni_manager.training_services.remote.placement import (
    MachineView,
    Placements,
    usable_gpus,
    why_gpus_lack,
)
from nni_manager.training_services.remote.section import RemoteMachine

A, B = MachineView("a", (0, 1)), MachineView("b", (0, 1))


def placements(gpus_per_job=0, **keys):
    return Placements({name: RemoteMachine(name, **keys) for name in "ab"}, gpus_per_job)


def test_a_job_goes_to_the_first_machine_in_the_file_among_those_with_the_fewest_jobs():
    some = placements()
    assert [some.take(f"job{number}", [A, B]) for number in range(4)] == ["a", "b", "a", "b"]
    some.release("job1")
    assert some.take("job4", [A, B]) == "b"
    assert some.take("job5", [B]) == "b"
    assert some.machine_of("job5") == "b"
    assert some.machine_of("job1") is None


def test_a_retried_trial_returns_to_the_machine_with_its_checkpoints_if_that_machine_has_room():
    some = placements(gpus_per_job=2)
    assert some.take("job0", [A, B], {"b"}) == "b"
    assert some.take("job1", [A, B], {"b"}) == "a"
    some.release("job0")
    some.release("job1")
    assert some.take("job2", [A], {"b"}) == "a"


def test_a_job_waits_if_no_machine_is_reachable():
    some = placements()
    assert some.take("job", []) is None
    assert some.why_pending([], ["a", "b"]) == "waits for a machine: a, b cannot be reached"


def test_a_machine_without_enough_free_gpus_gets_no_job():
    some = placements(gpus_per_job=2)
    assert [some.take(f"job{number}", [A, B]) for number in range(3)] == ["a", "b", None]
    assert some.gpus_of("job0") == some.gpus_of("job1") == (0, 1)
    assert some.why_pending([A, B], []) == "waits for 2 GPUs of one machine, which other trials have"
    some.release("job0")
    assert some.take("job2", [A, B]) == "a"


def test_each_gpu_of_a_machine_is_shared_by_at_most_the_configured_number_of_jobs():
    some = placements(gpus_per_job=1, max_trials_per_gpu=2)
    for number in range(8):
        assert some.take(f"job{number}", [A, B])
    assert some.take("job8", [A, B]) is None


def test_gpus_in_use_by_other_programs_are_assigned_only_if_the_configuration_allows_it():
    busy = MachineView("a", (0, 1), frozenset({0, 1}))
    some = placements(gpus_per_job=1)
    assert some.take("job", [busy]) is None
    assert some.why_pending([busy], ["b"]) == (
        "waits for a GPU: other programs compute on GPUs of a (0, 1); end them, or set useActiveGpu: true for the machine; "
        "b cannot be reached"
    )
    assert placements(gpus_per_job=1, may_use_active_gpu=True).take("job", [busy]) == "a"


def test_a_job_of_an_earlier_manager_keeps_its_gpus():
    some = placements(gpus_per_job=1)
    some.hold("old", "a", (1,))
    assert some.take("job", [A]) == "a"
    assert some.gpus_of("job") == (0,)
    assert some.take("next", [A]) is None


def test_the_usable_gpus_are_the_configured_gpus_that_exist_on_the_machine():
    assert usable_gpus(RemoteMachine("a"), (0, 1)) == (0, 1)
    assert usable_gpus(RemoteMachine("a", gpu_indices=(1, 5)), (0, 1)) == (1,)
    assert placements(gpus_per_job=1, gpu_indices=(1,)).take("job", [A]) == "a"


def test_the_error_for_too_few_or_missing_gpus_contains_the_name_of_the_machine():
    assert why_gpus_lack(RemoteMachine("a"), (), 0) == ""
    assert why_gpus_lack(RemoteMachine("a"), (0, 1), 2) == ""
    assert "cannot run trials on a: trialGpuNumber is 3 and the experiment may use 2" in why_gpus_lack(
        RemoteMachine("a"), (0, 1), 3
    )
    assert "cannot use gpuIndices of a: GPU 4 does not exist" in why_gpus_lack(
        RemoteMachine("a", gpu_indices=(0, 4)), (0, 1), 1
    )


def test_the_output_of_nvidia_smi_is_parsed():
    gpus = "0, GPU-aa\n1, GPU-bb\n"
    assert parse(gpus, "GPU-bb\nGPU-bb\n") == MachineGpus((0, 1), (1,))
    assert parse(gpus, "") == MachineGpus((0, 1), ())
    assert parse("", "") == MachineGpus((), ())
