"""A real Slurm cluster of two nodes on this machine, with its own munge. It does not use the system's daemons or configuration.

Source: Slurm 22.05 of Debian 12; slurm.conf(5).
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from real_experiment import wait_until

from trial_keeper import processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
NODES = ("n1", "n2")
_CONF = """
ClusterName=here
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
KillWait=2
ReturnToService=1
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port_1} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port_2} CPUs=4 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class SlurmHere:
    """The cluster. Its daemons and jobs have its SLURM_CONF in their environment."""

    def __init__(self, folder: Path, conf: str = "") -> None:
        """`conf`: further lines of slurm.conf, which take precedence."""
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.variables = {"SLURM_CONF": str(self.conf)}
        """What a user of the cluster has in the environment."""
        self.environ = os.environ | self.variables | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
        port, ports = free_port_pair(), free_port_pair()
        user = pwd.getpwuid(os.geteuid()).pw_name
        self.conf.write_text(
            _CONF.format(folder=folder, port=port, port_1=ports, port_2=ports + 1, user=user) + conf
        )
        for name in ("munge", "state"):
            (folder / name).mkdir(0o711)
        (folder / "munge" / "key").touch(0o600)
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons; returns when jobs can run."""
        munge = self.folder / "munge"
        files = [
            f"--{name}={munge / name.removesuffix('-file')}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        # The socket is in the folder of a test, which is closed to other users. Without `--force`, munged refuses such a socket.
        self._spawn("munged", "--foreground", "--force", "--num-threads=10", *files)
        wait_until((munge / "socket").exists, "munged listens")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], "the nodes are idle")

    def start_controller(self, *options: str) -> None:
        """Start slurmctld with its saved state. With the option `-c`, slurmctld discards all jobs."""
        self._spawn("slurmctld", "-D", "-f", str(self.conf), *options)
        wait_until(lambda: "is UP" in self.ask("scontrol", "ping"), "slurmctld answers")

    def stop_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld; SIGKILL loses the state of the last seconds."""
        self._end("slurmctld", number)

    def save_state(self) -> None:
        """Wait until slurmctld has written the present jobs to its disk. It writes its state every few seconds."""

        def stamp() -> int:
            with contextlib.suppress(FileNotFoundError):
                return (self.folder / "state" / "job_state").stat().st_mtime_ns
            return 0

        before = stamp()
        job_id = self.run("squeue", "-h", "-o", "%A").split()[0]
        self.run("scontrol", "update", f"jobid={job_id}", "comment=a change, which slurmctld writes")
        wait_until(lambda: stamp() not in (0, before), "slurmctld has saved its state")

    def copy_state(self, folder: Path) -> None:
        """Copy the state of slurmctld. It is suspended during the copy, because it writes and renames these files."""
        process = self._daemons["slurmctld"]
        threads = Path(f"/proc/{process.pid}/task")

        def is_suspended() -> bool:
            return all(processes.state_of(int(each.name)) == "T" for each in threads.iterdir())

        process.send_signal(signal.SIGSTOP)
        try:
            wait_until(is_suspended, "slurmctld is suspended")
            shutil.copytree(self.folder / "state", folder)
        finally:
            process.send_signal(signal.SIGCONT)

    def start_node(self, node: str) -> None:
        """Start the node's slurmd."""
        self._spawn("slurmd", "-D", "-N", node, "-f", str(self.conf), name=node)

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints; empty if it fails."""
        return subprocess.run(
            command, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ).stdout

    def run(self, *command: str) -> str:
        """The output of a Slurm command. Raises an error if the command fails."""
        return subprocess.run(
            command, env=self.environ, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()

    def states(self) -> dict[str, str]:
        """The state of each job that Slurm knows, by its name. Each task of an array has a number after the name."""
        lines = self.run("squeue", "-h", "--array", "-t", "all", "-o", "%j %K %T").splitlines()
        jobs = map(str.split, lines)
        return {name if task == "N/A" else f"{name}.{task}": state for name, task, state in jobs}

    def live(self) -> list[str]:
        """The names of all jobs of experiments that are still in the queue."""
        lines = self.run("squeue", "-h", "-o", "%j").splitlines()
        return [name for name in lines if name.startswith("nni-")]

    def submit(self, command: str, *options: str) -> str:
        """Submit a job that belongs to no experiment; return its id."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}")

    def experiment_keys(self, *, reuse: bool = False, **section: object) -> dict[str, object]:
        """The keys of an experiment file for this cluster."""
        return {"trainingServicePlatform": "slurm", "slurmConfig": {"reuse": reuse, **section}}

    def close(self) -> None:
        """End the daemons and all jobs."""
        conf = self.variables.items()

        def remaining() -> list[int]:
            found = processes.pids_where(lambda environ: conf <= environ.items())
            return [pid for pid in found if not processes.is_dead(pid)]

        deadline_s = time.monotonic() + DEADLINE_S
        while pids := remaining():
            assert time.monotonic() < deadline_s, f"they do not end: {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self._daemons.values():
                daemon.wait(DEADLINE_S)

    def _spawn(self, program: str, *arguments: str, name: str = "") -> None:
        name = name or program
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [shutil.which(program, path=self.environ["PATH"]) or program, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        daemon.wait(DEADLINE_S)


@contextlib.contextmanager
def a_slurm_here(conf: str = "") -> Iterator[SlurmHere]:
    """A running cluster; `conf`: see `SlurmHere`. Skips where Slurm is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        cluster = SlurmHere(Path(folder), conf)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
