"""Jobs as processes of low priority. A keeper's environment contains its settings, by which a later manager finds it."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys

from nni_manager.errors import RetryableError
from nni_manager.training_services.base import JobEnded, JobPresence, Placement, TrainingService
from trial_keeper import processes
from trial_keeper.processes import ProcessIdentity
from trial_keeper.settings import without_settings


class NiceService(TrainingService):
    runs_as_manager = stops_at_once = True

    def __init__(self, config, folder, on_job_ended):
        super().__init__(on_job_ended)
        self.run_script = f"#!/bin/bash\nexec {shlex.quote(sys.executable)} -m trial_keeper\n"
        self.config, self.folder = config, folder
        self.running, self.children = {}, {}
        self.poller = asyncio.create_task(self.poll())

    async def poll(self):
        """Report ends. A cluster would be asked about all jobs at once."""
        while True:
            for job_id in [job_id for job_id, keeper in self.running.items() if not keeper.is_alive]:
                del self.running[job_id]
                child = self.children.pop(job_id, None)
                code = None if child is None else child.wait()
                self.on_job_ended(JobEnded(job_id, code, self.termination_message(job_id)))
            await asyncio.sleep(0.2)

    def log(self, job_id):
        return self.folder.jobs / f"{job_id}.log"

    def placement(self, job_id):
        return Placement(str(self.config.code_dir), None)

    async def submit(self, settings):
        command = ["nice", "-n", str(self.config.cluster.niceness), "bash", str(self.folder.workspace.run_sh)]
        environ = without_settings(os.environ) | settings.to_environ()
        try:
            with open(self.log(settings.job_id), "ab") as log:
                child = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise RetryableError(f"cannot start a job: {error.strerror}; free memory") from error
        self.children[settings.job_id] = child
        self.running[settings.job_id] = ProcessIdentity.of(child.pid) or ProcessIdentity(child.pid, 0, "")

    async def stop(self, job_id):
        return self.send(job_id, signal.SIGTERM)

    async def kill(self, job_id):
        self.send(job_id, signal.SIGKILL)

    def send(self, job_id, number):
        keeper = self.running.get(job_id)
        return keeper is not None and processes.is_sent(keeper.pid, number)

    def removal_command(self, job_id):
        return f"kill -9 {self.running[job_id].pid}" if job_id in self.running else "nnictl stop"

    async def adopt(self, job_id):
        of_job = {"TRIAL_KEEPER_JOB_ID": job_id, "TRIAL_KEEPER_WORKSPACE": str(self.folder.workspace.root)}
        pids = processes.pids_where(lambda environ: of_job.items() <= environ.items())
        # The keeper's guard has the same environment, and is younger.
        found = sorted(filter(None, map(ProcessIdentity.of, pids)), key=lambda each: each.start_ticks)
        if not found:
            return JobPresence.ENDED if self.log(job_id).exists() else JobPresence.UNKNOWN
        self.running[job_id] = found[0]
        return JobPresence.RUNNING

    def termination_message(self, job_id):
        log = self.log(job_id)
        return log.read_text(errors="replace")[-2000:].strip() if log.exists() else ""

    async def close(self):
        self.poller.cancel()
