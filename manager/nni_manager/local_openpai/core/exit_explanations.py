"""What an exit code of OpenPAI means for a user: why it is reported, how to see it happen, and what to do. The words are ours.

Source of the codes and their causes: microsoft/pai v1.8.1 (k8s-job-exit-spec.yaml).
"""

from __future__ import annotations

from trial_keeper.frozen_dataclass import dataclass

_RETRY = "wait for the next retry"
_ADMIN = "tell the cluster's administrator"
_DIAGNOSTICS = "read the diagnostics"
_LOGS = "read the logs of the task"


@dataclass(frozen=True, slots=True)
class ExitExplanation:
    """The cause of a code, steps that end a job with it, and remedies; empty where there are none."""

    reason: str
    repro: tuple[str, ...]
    solution: tuple[str, ...]


# Code: reason; one way to reproduce it; remedies.
_ROWS: dict[int, tuple[str, str, tuple[str, ...]]] = {
    0: ("", "run a command that exits with 0", ()),
    -100: ("somebody deleted the attempt's ConfigMap", "delete the attempt's ConfigMap", (_RETRY, _ADMIN)),
    -101: ("somebody deleted a pod of the job", "delete a pod of the job", (_RETRY, _ADMIN)),
    -110: ("the attempt's ConfigMap did not appear in time", "stop the API server after its creation", (_RETRY, _ADMIN)),
    -111: ("a pod did not appear in time", "stop the API server after the pod's creation", (_RETRY, _ADMIN)),
    -120: ("a pod could not be created for now", "use up the pod quota of the namespace", (_RETRY, _ADMIN)),
    -200: ("the pod's definition is invalid", "submit a pod with two containers of one name", (_DIAGNOSTICS, "correct the job")),
    -210: ("a user stopped the job", "stop a job", ()),
    -220: ("the job was decided while this task ran", "let one of two tasks succeed with minSucceededInstances 1", ()),
    -230: ("a user deleted the task", "delete a task of a job", ()),
    -300: ("the pod failed, but none of its containers did", "submit a pod that the node refuses",
        (_DIAGNOSTICS, _RETRY, _ADMIN)),
    -310: ("a pod could not be created", "let the API server answer a creation with 500", (_DIAGNOSTICS, _RETRY, _ADMIN)),
    -1000: ("the node lacked a resource and evicted the pod", "use up a node's memory from outside", (_RETRY, _ADMIN)),
    -1001: ("the node of the pod is gone", "stop the node's kubelet", (_RETRY, _ADMIN)),
    -1002: ("the pod was scheduled to a node without room for it", "bind a pod that needs more memory to a node",
        (_RETRY, _ADMIN)),
    -1003: ("a more important pod took the place of this one", "submit a critical pod that fills a node", (_RETRY, _ADMIN)),
    -1004: ("the pod ran longer than its deadline", "submit a pod with activeDeadlineSeconds 1", ("request more time",)),
    -1005: ("the resources that the task requests can never be granted", "request more GPUs than there are", ("request less",)),
    -1006: ("the node refused the pod unexpectedly", "let a node's device plugin fail", (_RETRY, _ADMIN)),
    -1100: ("the cluster refused the job", "submit a job that the API server refuses", (_DIAGNOSTICS, "correct the job")),
    -1200: ("the task used more memory than it requested", "allocate more than memoryMB",
        ("request more memory", "use less memory")),
    -1201: ("the container could not be made", "start an image without a shell", (_DIAGNOSTICS, _RETRY, _ADMIN)),
    -1202: ("the container's first program may not be executed", "start a container with the command /etc", (_ADMIN,)),
    -1203: ("the container's first program does not exist", "start a container with the command nothing", (_ADMIN,)),
    -1204: ("the container did not start", "use a container runtime that fails", (_DIAGNOSTICS, _RETRY, _ADMIN)),
    -1205: ("a GPU of the task disappeared", "remove a GPU's driver from a node", (_RETRY, _ADMIN)),
    -1300: ("the init container used more memory than it has", "let the init container allocate memory", (_RETRY, _ADMIN)),
    128: ("a signal that may stem from a GPU's memory error", "run a command that exits with 128", (_LOGS, _RETRY, _ADMIN)),
    130: ("the container received SIGINT", "send SIGINT to the task", (_RETRY,)),
    131: ("the container received SIGQUIT", "send SIGQUIT to the task", (_RETRY,)),
    132: ("the program executed an invalid instruction", "run a program for another processor",
        ("build the program for this processor",)),
    134: ("the program called abort", "run a program that calls abort()", (_LOGS,)),
    135: ("the program received SIGBUS", "read a memory-mapped file after its end", (_LOGS, "request a larger shmMB")),
    136: ("the program divided an integer by zero, or similar", "run a program that divides by zero", (_LOGS,)),
    137: ("the container received SIGKILL", "send SIGKILL to the task", (_RETRY, "request more memory if it used up all")),
    139: ("the program used memory that is not its own", "run a program that reads from address 0", (_LOGS,)),
    141: ("the program wrote into a pipe without a reader", "run yes | true with pipefail", ("let the reader read to the end",)),
    143: ("the container received SIGTERM", "send SIGTERM to the task", (_RETRY,)),
    220: ("the shell found no such command", "run a command that does not exist",
        ("correct the command", "use an image that has it")),
    221: ("TensorFlow ran out of GPU memory", "train with a batch that is too large", ("use a smaller batch or model",)),
    222: ("a process of MPI used memory that is not its own", "run an MPI program that reads from address 0", (_LOGS,)),
    223: ("a GPU reported a memory error that it could not correct", "use a defective GPU", (_RETRY, _ADMIN)),
    224: ("the image's CUDA is newer than the driver", "use an image with a newer CUDA", ("use an image with an older CUDA",)),
    225: ("the image's cuDNN is not the one that the program was built for", "use an image with another cuDNN",
        ("use an image with the right cuDNN",)),
    226: ("the program ran out of GPU memory", "train with a batch that is too large", ("use a smaller batch or model",)),
    228: ("the program was called with a wrong argument", "pass a wrong argument to TensorFlow", ("correct the argument",)),
    229: ("the model does not fit its data", "load weights of another model", (_LOGS,)),
    230: ("the program cannot write to the path of its results", "save a model to a path that does not exist",
        ("correct the path",)),
    231: ("the Python code has a syntax error", "run a Python file with an open bracket", ("correct the code",)),
    232: ("Python cannot import a module", "import a module that is not installed", ("install it in the command or the image",)),
    233: ("the Python code used an index beyond the end of a list", "read list()[0]", ("correct the code",)),
    234: ("the program used memory that is not its own", "print 'Segmentation fault' and exit with 1", (_LOGS,)),
    235: ("the engine of the program crashed", "run an engine that writes a core dump", (_LOGS,)),
    249: ("the tasks of the job did not reach each other by ssh in time", "stop sshd of one task", (_LOGS, _ADMIN)),
    250: ("the tasks of the job could not wait for each other for now", "stop the API server at the start of a job",
        (_RETRY, _ADMIN)),
    251: ("not all tasks of the job could start within the time limit", "request more than is free",
        ("request less", "set gangAllocation: false")),
    252: ("the tasks of the job could not wait for each other", "forbid the barrier to read the job", (_ADMIN,)),
    253: ("a port of the task was taken", "listen on all ports of the node", (_RETRY,)),
    254: ("the image of the task does not exist", "use an image that does not exist",
        ("correct the image's uri", "add auth for a private registry")),
    255: ("the command failed, and nothing in its log tells why", "run a command that exits with 1",
        (_LOGS, "correct the command")),
    256: ("the runtime of OpenPAI failed", "end the runtime's process", (_LOGS, _ADMIN)),
    -8000: ("the cluster reported a code that OpenPAI does not know", "use a newer FrameworkController", (_DIAGNOSTICS, _ADMIN)),
}  # fmt: skip

EXIT_EXPLANATIONS = {
    code: ExitExplanation(reason, (repro,), solution) for code, (reason, repro, solution) in _ROWS.items()
}
