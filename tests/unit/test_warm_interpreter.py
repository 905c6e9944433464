"""Decisions of the warm interpreter that need no process."""

import pytest

from trial_keeper.host import warm_interpreter


@pytest.mark.parametrize("device", ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/kfd"])
def test_an_open_gpu_device_is_reported_as_an_initialised_gpu(device):
    assert "CUDA" in warm_interpreter._impurity_of(["socket:[7]", device])


def test_an_open_dev_null_or_dev_urandom_is_not_reported_as_a_problem():
    assert warm_interpreter._impurity_of(["/dev/urandom", "/dev/null"]) is None


@pytest.mark.parametrize(
    "target", ["socket:[7]", "pipe:[7]", "anon_inode:[eventpoll]", "/data/log (deleted)"]
)
def test_a_socket_or_pipe_or_deleted_file_is_reported_if_the_warm_interpreter_has_it_open(target):
    assert target in warm_interpreter._impurity_of(["/dev/urandom", target])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(None), 0),
        (SystemExit(3), 3),
        (SystemExit(259), 3),
        (SystemExit(-1), 255),
        (SystemExit("why"), 1),
        (ValueError(), 1),
        (KeyboardInterrupt(), None),
    ],
)
def test_an_exception_is_mapped_to_the_exit_code_that_python_would_return(error, code):
    assert warm_interpreter._code_of(error) == code
