"""Which machine gets a job, and the reason that a waiting job shows."""

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


def test_jobs_go_to_the_machine_with_the_fewest_in_the_order_of_the_file():
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


def test_without_a_machine_that_answers_there_is_no_place():
    some = placements()
    assert some.take("job", []) is None
    assert some.why_pending([], ["a", "b"]) == "waits for a machine: a, b cannot be reached"


def test_a_full_machine_is_passed_over():
    some = placements(gpus_per_job=2)
    assert [some.take(f"job{number}", [A, B]) for number in range(3)] == ["a", "b", None]
    assert some.gpus_of("job0") == some.gpus_of("job1") == (0, 1)
    assert some.why_pending([A, B], []) == "waits for 2 GPUs of one machine, which other trials have"
    some.release("job0")
    assert some.take("job2", [A, B]) == "a"


def test_gpus_are_shared_by_as_many_jobs_as_the_machine_allows():
    some = placements(gpus_per_job=1, max_trials_per_gpu=2)
    for number in range(8):
        assert some.take(f"job{number}", [A, B])
    assert some.take("job8", [A, B]) is None


def test_gpus_of_other_programs_are_left_out_unless_they_may_be_shared():
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


def test_the_gpus_of_a_machine_are_those_of_the_file_that_it_has():
    assert usable_gpus(RemoteMachine("a"), (0, 1)) == (0, 1)
    assert usable_gpus(RemoteMachine("a", gpu_indices=(1, 5)), (0, 1)) == (1,)
    assert placements(gpus_per_job=1, gpu_indices=(1,)).take("job", [A]) == "a"


def test_a_machine_with_too_few_gpus_is_named():
    assert why_gpus_lack(RemoteMachine("a"), (), 0) == ""
    assert why_gpus_lack(RemoteMachine("a"), (0, 1), 2) == ""
    assert "cannot run trials on a: trialGpuNumber is 3 and the experiment may use 2" in why_gpus_lack(
        RemoteMachine("a"), (0, 1), 3
    )
    assert "cannot use gpuIndices of a: GPU 4 does not exist" in why_gpus_lack(
        RemoteMachine("a", gpu_indices=(0, 4)), (0, 1), 1
    )


def test_the_output_of_nvidia_smi_is_read():
    gpus = "0, GPU-aa\n1, GPU-bb\n"
    assert parse(gpus, "GPU-bb\nGPU-bb\n") == MachineGpus((0, 1), (1,))
    assert parse(gpus, "") == MachineGpus((0, 1), ())
    assert parse("", "") == MachineGpus((), ())
