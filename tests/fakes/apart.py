"""The manager's process with its jobs elsewhere: other network, other clock, another path to the storage.

Started as `python apart.py` with the manager's own arguments. Everything in it is the manager's but three answers: where its jobs
run, at which address they reach it, and where it listens.
"""

import json
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import nni_manager.__main__ as manager
from nni_manager import training_service_factory
from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.store.writer import Store
from nni_manager.training_services.local.client import LocalTrainingService
from trial_keeper.wire.workspace import Workspace

VARIABLE = "FAULTS_APART"


@dataclass(frozen=True)
class Apart:
    """What is different for the jobs. The process is told by `VARIABLE`."""

    workspace: str
    """Where they see it."""
    announced: str
    """The manager's address for them."""
    listens_at: str
    prefix: tuple[str, ...] = ()
    """What starts a process on their side."""
    environ: tuple[tuple[str, str], ...] = ()
    planted: str = ""
    """What is broken on purpose in the manager: a name in PLANTED."""

    def to_environ(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environ(cls) -> "Apart":
        document = json.loads(os.environ[VARIABLE])
        document["prefix"] = tuple(document["prefix"])
        document["environ"] = tuple((name, value) for name, value in document["environ"])
        return cls(**document)


class LocalServiceApart(LocalTrainingService):
    """Processes of this machine, on the other side."""

    def __init__(self, apart: Apart, config, folder, on_job_ended):
        super().__init__(config, Workspace(Path(apart.workspace)), folder.jobs, on_job_ended)
        self._apart = apart
        settings = [f"{name}={value}" for name, value in apart.environ]
        command = [*apart.prefix, "env", *settings, sys.executable, "-m", "trial_keeper"]
        self.run_script = f"#!/bin/bash\nexec {shlex.join(command)}\n"

    async def submit(self, settings):
        await super().submit(replace(settings, workspace=self._apart.workspace))


def _count_again(receiver, stream, offset, data, take=AttemptIngest.take):
    """What comes again is taken for new."""
    return take(receiver, stream, receiver.received(stream), data)


def _leave_out(receiver, stream, offset, data, take=AttemptIngest.take):
    """The last record of what arrived is forgotten."""
    return [replace(commit, records=commit.records[:-1]) for commit in take(receiver, stream, offset, data)]


def _acknowledge_early(store, writes, now_s, commit=Store.commit):
    """The offset is durable a moment before the rows are."""
    commit(
        store,
        [replace(each, records=()) if isinstance(each, StreamWrite) else each for each in writes],
        now_s,
    )
    time.sleep(0.2)
    return commit(store, [each for each in writes if isinstance(each, StreamWrite) and each.records], now_s)


def _commit_slowly(store, writes, now_s, commit=Store.commit):
    """No fault: what comes meanwhile, and again when the link was lost, is received and not yet durable."""
    time.sleep(0.3)
    return commit(store, writes, now_s)


PLANTED = {
    "commits slowly": [(Store, "commit", _commit_slowly)],
    "counts again": [(Store, "commit", _commit_slowly), (AttemptIngest, "take", _count_again)],
    "leaves out": [(AttemptIngest, "take", _leave_out)],
    "acknowledges early": [(Store, "commit", _acknowledge_early)],
}


def main() -> int:
    apart = Apart.from_environ()
    training_service_factory.make_service = lambda config, folder: (
        lambda on_job_ended: LocalServiceApart(apart, config, folder, on_job_ended)
    )
    training_service_factory.address_for_keepers = lambda config: apart.announced
    training_service_factory.listens_at = lambda address: apart.listens_at
    for place in PLANTED.get(apart.planted, []):
        setattr(*place)
    return manager.main()


if __name__ == "__main__":
    sys.exit(main())
