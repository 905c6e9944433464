"""A manager process whose jobs run apart from it: in another network, with another clock, or with another path to the storage.

Started as `python apart.py` with the manager's own arguments. Only three things differ from the real manager: where the jobs run,
the address at which jobs reach the manager, and where the manager listens.
"""

import asyncio
import json
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import nni_manager.__main__ as manager
from nni_manager.domain import learning_curve
from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.engine.shared_files import SharedFiles
from nni_manager.store.writer import Store
from nni_manager.training_services.base import JobEnded, JobPresence
from nni_manager.training_services.local.client import LocalTrainingService
from nni_manager.training_services.local.platform import LocalPlatform
from trial_keeper.wire.checkpoints import Checkpoint, Manifest, newest_first
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

VARIABLE = "FAULTS_APART"


@dataclass(frozen=True)
class Apart:
    """Describes where the jobs run and how they reach the manager. The manager process receives it in the environment variable
    `VARIABLE`.
    """

    workspace: str
    """The path of the workspace for the jobs."""
    announced: str
    """The manager's address for them."""
    listens_at: str
    prefix: tuple[str, ...] = ()
    """The command prefix that starts a process on the jobs' side."""
    environ: tuple[tuple[str, str], ...] = ()
    planted: str = ""
    """A planted fault in the product: a name in PLANTED."""
    preempted: str = ""
    """A folder with a file for each job that was preempted; empty: the service reports no preemption."""

    def to_environ(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environ(cls) -> "Apart":
        document = json.loads(os.environ[VARIABLE])
        document["prefix"] = tuple(document["prefix"])
        document["environ"] = tuple((name, value) for name, value in document["environ"])
        return cls(**document)


class LocalServiceApart(LocalTrainingService):
    """Runs jobs as processes of this machine, in the network and with the clock of the jobs."""

    # The test adds a prefix to run.sh, and a forked keeper would not run this script.
    forks_keepers = False

    def __init__(self, apart: Apart, config, folder, on_job_ended):
        super().__init__(config, Workspace(Path(apart.workspace)), folder.jobs, on_job_ended)
        self._apart = apart
        self.reports_preemption = bool(apart.preempted)
        on_ended = self.on_job_ended
        self.on_job_ended = lambda ended: on_ended(self._with_reason(ended))
        settings = [f"{name}={value}" for name, value in apart.environ]
        command = [*apart.prefix, "env", *settings, sys.executable, "-m", "trial_keeper"]
        self.run_script = f"#!/bin/bash\nexec {shlex.join(command)}\n"

    async def submit(self, settings):
        await super().submit(replace(settings, workspace=self._apart.workspace))

    async def adopt(self, job_id):
        presence = await super().adopt(job_id)
        if presence is JobPresence.ENDED and self._was_preempted(job_id):
            # On a real cluster, a preempted job still exists when a manager adopts it. So this service adopts the job as running,
            # and then reports its end with the reason.
            asyncio.get_running_loop().call_soon(self.on_job_ended, JobEnded(job_id, None, ""))
            return JobPresence.RUNNING
        return presence

    def _was_preempted(self, job_id):
        return self.reports_preemption and Path(self._apart.preempted, job_id).exists()

    def _with_reason(self, ended):
        if not self._was_preempted(ended.job_id):
            return ended
        return replace(ended, exit_code=None, message="preempted", reason=ExitReason.PREEMPTED)


def _count_again(receiver, stream, offset, data, take=AttemptIngest.take):
    """Planted fault: bytes that are sent again are stored as new ones."""
    return take(receiver, stream, receiver.received(stream), data)


def _leave_out(receiver, stream, offset, data, take=AttemptIngest.take):
    """Planted fault: the last record of each batch is dropped."""
    return [replace(commit, records=commit.records[:-1]) for commit in take(receiver, stream, offset, data)]


def _acknowledge_early(store, writes, now_s, commit=Store.commit):
    """Planted fault: the store commits the new offset of a stream before the stream's rows."""
    commit(
        store,
        [replace(each, records=()) if isinstance(each, StreamWrite) else each for each in writes],
        now_s,
    )
    time.sleep(0.2)
    return commit(store, [each for each in writes if isinstance(each, StreamWrite) and each.records], now_s)


def _commit_slowly(store, writes, now_s, commit=Store.commit):
    """Not a fault: commits are slow, so that after a reconnect resent bytes arrive before the first copy is stored."""
    time.sleep(0.3)
    return commit(store, writes, now_s)


def _accept_unsigned(files, trial, signer, find=SharedFiles.find_checkpoints):
    """Planted fault: a checkpoint that no keeper has signed is offered to the next attempt."""
    found = find(files, trial, signer)
    for key in files.workspace.attempts_of(trial.trial_id):
        manifests = files.workspace.attempt(key).checkpoints.glob("*.json")
        found += [Checkpoint.of(key, Manifest.from_bytes(path.read_bytes())) for path in manifests]
    return newest_first(found, trial.trial_id)


def _accept_early_marks(checkpoints, source, start):
    """Planted fault: the newest checkpoint mark of an attempt is used, even if the checkpoint's manifest was never renamed."""
    of_source = [each for each in checkpoints.values() if each.attempt_id == source.attempt_id]
    return max(of_source, key=lambda each: each.offset, default=None)


PLANTED = {
    "commits slowly": [(Store, "commit", _commit_slowly)],
    "counts again": [(Store, "commit", _commit_slowly), (AttemptIngest, "take", _count_again)],
    "leaves out": [(AttemptIngest, "take", _leave_out)],
    "acknowledges early": [(Store, "commit", _acknowledge_early)],
    "accepts unsigned": [(SharedFiles, "find_checkpoints", _accept_unsigned)],
    "accepts early marks": [(learning_curve, "_checkpoint", _accept_early_marks)],
}


def main() -> int:
    apart = Apart.from_environ()
    LocalPlatform.make_service = lambda platform, folder: (
        lambda on_job_ended: LocalServiceApart(apart, platform.config, folder, on_job_ended)
    )
    LocalPlatform.address_for_keepers = lambda platform: apart.announced
    LocalPlatform.address_to_listen_on = lambda platform, address: apart.listens_at
    for place in PLANTED.get(apart.planted, []):
        setattr(*place)
    return manager.main()


if __name__ == "__main__":
    sys.exit(main())
