"""Which machine gets a job, and which of its GPUs. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nni_manager.training_services.local.gpus import GpuShares
from nni_manager.training_services.remote.section import RemoteMachine
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class MachineView:
    """A machine that may get a job. `present`: its GPUs; `in_use`: those on which any process computes."""

    key: str
    present: tuple[int, ...] = ()
    in_use: frozenset[int] = frozenset()


class Placements:
    """The machines and the GPUs of the jobs of one experiment. `gpus_per_job` 0: GPUs are not managed."""

    def __init__(self, machines: Mapping[str, RemoteMachine], gpus_per_job: int) -> None:
        self._machines, self._gpus_per_job = machines, gpus_per_job
        self._shares: dict[str, GpuShares] = {
            key: GpuShares(each.gpu_indices or (), each.max_trials_per_gpu) for key, each in machines.items()
        }
        self._machine_of: dict[str, str] = {}

    def take(
        self, job_id: str, candidates: Sequence[MachineView], preferred: Collection[str] = ()
    ) -> str | None:
        """Allocate the least busy machine that has room, if possible one of the `preferred`; None if no machine has room.

        The order of machines decides between equals.
        """
        held = list(self._machine_of.values())
        for view in sorted(candidates, key=lambda view: (view.key not in preferred, held.count(view.key))):
            if self._take_gpus(job_id, view):
                self._machine_of[job_id] = view.key
                return view.key
        return None

    def _take_gpus(self, job_id: str, view: MachineView) -> bool:
        if not self._gpus_per_job:
            return True
        machine, share = self._machines[view.key], self._shares[view.key]
        share.indices = usable_gpus(machine, view.present)
        in_use = frozenset() if machine.may_use_active_gpu else view.in_use
        return share.take(job_id, self._gpus_per_job, in_use) is not None

    def hold(self, job_id: str, key: str, gpu_indices: tuple[int, ...]) -> None:
        """Record what a job of an earlier manager has."""
        self._machine_of[job_id] = key
        self._shares[key].hold(job_id, gpu_indices)

    def machine_of(self, job_id: str) -> str | None:
        """The job's machine; None without an allocation."""
        return self._machine_of.get(job_id)

    def gpus_of(self, job_id: str) -> tuple[int, ...]:
        """The job's GPUs."""
        key = self._machine_of.get(job_id)
        return () if key is None else self._shares[key].held_by(job_id)

    def release(self, job_id: str) -> None:
        """Free what the job has."""
        if (key := self._machine_of.pop(job_id, None)) is not None:
            self._shares[key].release(job_id)

    def why_pending(self, candidates: Sequence[MachineView], away: Collection[str]) -> str:
        """What a job waits for that no machine has room for. `away`: the machines that do not answer."""
        absent = f"{', '.join(self._machines[key].address for key in away)} cannot be reached" if away else ""
        if not self._gpus_per_job or not candidates:
            return f"waits for a machine: {absent}" if absent else "waits for a machine"
        wanted = "a GPU" if self._gpus_per_job == 1 else f"{self._gpus_per_job} GPUs of one machine"
        others = [
            f"{self._machines[view.key].address} ({', '.join(map(str, used))})"
            for view in candidates
            if not self._machines[view.key].may_use_active_gpu
            and (used := self._shares[view.key].used_by_others(view.in_use))
        ]
        if others:
            why = f"other programs compute on GPUs of {'; '.join(others)}; end them, or set useActiveGpu: true for the machine"
            return f"waits for {wanted}: {'; '.join(filter(None, (why, absent)))}"
        return f"waits for {wanted}, which other trials have{f'; {absent}' if absent else ''}"


def usable_gpus(machine: RemoteMachine, present: tuple[int, ...]) -> tuple[int, ...]:
    """The GPUs of a machine that trials may have."""
    wanted = machine.gpu_indices
    return present if wanted is None else tuple(index for index in wanted if index in present)


def why_gpus_lack(machine: RemoteMachine, present: tuple[int, ...], gpus_per_job: int) -> str:
    """Why no trial can run on the machine; empty if trials can."""
    absent = sorted({*(machine.gpu_indices or ())} - {*present})
    if gpus_per_job and absent:
        return (
            f"cannot use gpuIndices of {machine.address}: GPU {absent[0]} does not exist, `nvidia-smi` there shows "
            f"{len(present)} GPUs; remove gpuIndices to use all of them"
        )
    usable = len(usable_gpus(machine, present))
    if gpus_per_job > usable:
        return (
            f"cannot run trials on {machine.address}: trialGpuNumber is {gpus_per_job} and the experiment may use {usable} GPUs "
            "there (`nvidia-smi` shows them); lower trialGpuNumber, or remove the machine"
        )
    return ""
