"""OpenPAI's example of a distributed job with Open MPI, and a stand-in for the training that it starts.

Source: docs/manual/cluster-user/advanced-jobs.md and examples/yaml-templates/horovod-pytorch-synthetic-benchmark.yaml of OpenPAI.
"""

from pathlib import Path

import yaml

_DOCUMENTED = Path(__file__).parents[1] / "golden/openpai/jobs/infiniband_fixed.yaml"
# The text of OpenPAI's manual omits these options of mpirun. Source: OpenPAI's template of this job.
_OPTIONS = """-bind-to none -map-by slot
-mca pml ob1
-mca btl ^openib
-mca btl_tcp_if_exclude lo,docker0
"""
TRAINING = "pytorch_synthetic_benchmark.py"
# Horovod's benchmark needs eight GPUs. This program replaces the benchmark, and adds up the ranks with the same MPI library.
BENCHMARK = """\
import ctypes, os, sys
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
world, integer, add = (
    ctypes.addressof(ctypes.c_char.in_dll(mpi, name))
    for name in ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum")
)
world, integer, add = map(ctypes.c_void_p, (world, integer, add))
rank, total = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Init(None, None)
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Allreduce(ctypes.byref(rank), ctypes.byref(total), 1, integer, add, world)
line = " ".join([f"rank {rank.value} of the sum {total.value}", *sys.argv[1:]]) + "\\n"
os.write(1, line.encode())  # at once: mpirun mixes what ranks write in pieces
mpi.MPI_Finalize()
"""
PRINTED = {f"rank {rank} of the sum {sum(range(8))} --model resnet50 --batch-size 64" for rank in range(8)}


def mpi_job(training: str, *, image: str | None = None) -> bytes:
    """The job of the documentation, with the path of the training and another image."""
    job = yaml.safe_load(_DOCUMENTED.read_text())
    job["protocolVersion"] = 2
    job["name"] = "job"
    if image is not None:
        job["prerequisites"][0]["uri"] = image
    commands = job["taskRoles"]["master"]["commands"]
    before, _, parameters = commands[-1].partition("<% $parameters.nccl %>")
    commands[-1] = (
        f"{before}{_OPTIONS}<% $parameters.nccl %> -x PATH -x LD_LIBRARY_PATH python3 {training}{parameters}"
    )
    commands[-1] = " ".join(commands[-1].split())
    return yaml.safe_dump(job, sort_keys=False).encode()
