"""The call of sbatch, the batch script and the environment of a job. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from nni_manager.training_services.slurm.section import SlurmSection
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import PREFIX, without_settings

# Source: sbatch(1), --time. Days come with hours, hours with minutes and seconds.
TIME_LIMIT = r"^([0-9]{1,6}|[0-9]{1,6}:[0-5]?[0-9]|[0-9]{1,5}:[0-5]?[0-9]:[0-5]?[0-9]|[0-9]{1,4}-[0-9]{1,2}(:[0-5]?[0-9]){0,2})$"
# The keeper is signalled so long before the time limit: its grace period of 30 s, and as much to store what is left.
_MAX_NOTICE_S = 60
OWN_OPTIONS = frozenset(
    {
        *(
            "--array",
            "--chdir",
            "--clusters",
            "--error",
            "--export",
            "--export-file",
            "--job-name",
            "--no-requeue",
        ),
        *(
            "--open-mode",
            "--output",
            "--parsable",
            "--quiet",
            "--requeue",
            "--signal",
            "--test-only",
            "--wait",
            "--wrap",
        ),
    }
)
"""The options that identify a job or start its keeper, and those that change what sbatch prints."""
# Those of apptainer exec that give a container GPUs.
_GPU_OPTIONS = frozenset(("--nv", "--nvccli", "--rocm"))
# Array task 3 gets its setting JOB_ID as TRIAL_KEEPER_TASK_3_JOB_ID.
_TASK_PREFIX = f"{PREFIX}TASK_"
# Defaults of the user for commands whose output is read here, and what a job around the manager has set for itself.
_NOT_PASSED = ("SQUEUE_", "SCANCEL_", "SACCT_", "SLURM_", "SBATCH_ARRAY", "SBATCH_CLUSTERS", "SBATCH_WAIT")


def job_prefix(experiment_id: str) -> str:
    """The start of the names of all jobs of the experiment."""
    return f"nni-{experiment_id}-"


def job_name(experiment_id: str, job_id: str) -> str:
    """The name of a job in Slurm."""
    return job_prefix(experiment_id) + job_id


def seconds_of(limit: str) -> int | None:
    """The seconds of a time limit or of a time left, as Slurm writes it; None without a limit.

    Source: sbatch(1), --time.
    """
    if re.fullmatch(TIME_LIMIT, limit) is None:
        return None
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def notice_s(time_limit: str | None) -> int:
    """Seconds between the notice to the keeper and the time limit: a quarter of a short limit."""
    limit_s = None if time_limit is None else seconds_of(time_limit)
    return _MAX_NOTICE_S if not limit_s else max(1, min(_MAX_NOTICE_S, limit_s // 4))


def sbatch_options(section: SlurmSection) -> list[str]:
    """The options of sbatch that the experiment file has."""
    named = {
        "partition": section.partition,
        "account": section.account,
        "qos": section.qos,
        "time": section.time_limit,
        "gres": section.gres,
        "gpus": section.gpus or None,
        "cpus-per-task": section.cpus_per_task,
        "mem": None if section.memory_mb is None else f"{section.memory_mb}M",
        "constraint": section.constraint,
        "nodes": section.nodes,
        "ntasks": section.ntasks,
    }
    given = [f"--{name}={value}" for name, value in named.items() if value is not None]
    return [*given, *section.extra_args]


def task_log(log: str, task: int | str) -> str:
    """The file of the output of an array task. `log`: see `sbatch_command`. `task`: its number, or `%a` for Slurm."""
    return f"{log}-{task}.log"


def sbatch_command(section: SlurmSection, name: str, folder: str, log: str, tasks: int = 0) -> list[str]:
    """The call of sbatch, which reads the batch script from stdin and prints the id of the job.

    `folder`: where the script starts. `log`: the file that receives its output. `tasks`: the number of jobs in a job array, 0 for
    a job alone; the output of its tasks is in `task_log`.
    """
    output = log.replace("%", "%%")
    return [
        *("sbatch", "--parsable", f"--job-name={name}", f"--chdir={folder}", "--export=ALL"),
        *([f"--array=0-{tasks - 1}"] if tasks else []),
        # A second start of the job must not truncate the output of the first.
        *(f"--output={task_log(output, '%a') if tasks else output}", "--open-mode=append"),
        # A requeued job would run its trial twice; the manager submits a preempted trial again.
        *("--no-requeue", f"--signal=B:TERM@{notice_s(section.time_limit)}"),
        *sbatch_options(section),
    ]


def array_environ(environs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The environment of a job array: what all its jobs have in common, and the other settings of each under names of its own.

    They are not in the batch script, which Slurm may store in its database.
    """
    common = dict(set.intersection(*({*environ.items()} for environ in environs)))
    for task, environ in enumerate(environs):
        own = {name: value for name, value in environ.items() if name not in common}
        common |= {f"{_TASK_PREFIX}{task}_{name.removeprefix(PREFIX)}": value for name, value in own.items()}
    return common


def task_snippet(environs: Sequence[Mapping[str, str]]) -> str:
    """Lines of bash that give an array task its settings, see `array_environ`, and add its job to the path in `nni_started`.

    The trial then has the same environment as in a job that was submitted alone.
    """
    names = sorted({name.removeprefix(PREFIX) for environ in environs for name in environ})
    return f"""\
for nni_name in {" ".join(names)}; do
  nni_own={_TASK_PREFIX}${{SLURM_ARRAY_TASK_ID}}_$nni_name
  [ -z "${{!nni_own+set}}" ] || export "{PREFIX}$nni_name=${{!nni_own}}"
done
nni_slurm_id=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
unset "${{!{_TASK_PREFIX}@}}" "${{!SLURM_ARRAY_@}}"
nni_started=$nni_started/${PREFIX}JOB_ID.started
"""


def batch_script(run_script: str, started: str, container: str = "", task: str = "") -> str:
    """The batch script: runs `run_script` once, whose first process Slurm signals. `container`: see `container_snippet`.

    `started` is a file that exists once the job has started, and has its id in Slurm. A slurmctld that was killed has lost its
    last seconds, and may start a job again that has ended. For a job array, `started` is the folder of such files, and `task`
    is its `task_snippet`.
    """
    return f"""\
#!/bin/bash
nni_started={shlex.quote(started)}
{task}if [ -e "$nni_started" ]; then
  echo "trial-keeper: this job has run before; it does not run again" >&2
  exit 1
fi
if ! (set -C; : > "$nni_started"); then
  echo "trial-keeper: cannot create this file; use a folder that the compute nodes share" >&2
  exit {int(KeeperExit.WORKSPACE)}
fi
echo "${{nni_slurm_id-$SLURM_JOB_ID}}" > "$nni_started" # the job runs without it on a full disk
{container}exec {'"${in_container[@]}" ' if container else ""}bash {shlex.quote(run_script)}
"""


def container_snippet(section: SlurmSection, folder: str) -> str:
    """Lines of bash that set `in_container` to the call of Apptainer, or of its fork SingularityCE; empty without an image.

    Both pass the environment and signals to the container, whose first process therefore is the job's. `folder`: the
    experiment's, which has the same path there.
    """
    if section.container_image is None:
        return ""
    has_gpus = bool(section.gpus) or (section.gres or "").startswith("gpu")
    chosen = {option.partition("=")[0] for option in section.container_args}
    gpus = ["--nv"] if has_gpus and not chosen & _GPU_OPTIONS else []
    options = [f"--bind={folder}", *gpus, *section.container_args, section.container_image]
    return f"""\
if ! apptainer=$(command -v apptainer || command -v singularity); then
  echo "trial-keeper: cannot find apptainer on this node; load its module before nnictl create, so that jobs have it on PATH" >&2
  exit {int(KeeperExit.MISSING)}
fi
in_container=("$apptainer" exec {shlex.join(options)})
"""


def commands_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The manager's environment for Slurm's commands, and with them for jobs."""
    passed = {name: value for name, value in environ.items() if not name.startswith(_NOT_PASSED)}
    kept = {name: environ[name] for name in ("SLURM_CONF",) if name in environ}
    return without_settings(passed) | kept


_END = "END_OF_TRIAL_KEEPERS_INPUT"


def login_script(command: Sequence[str], stdin: str, variables: Mapping[str, str]) -> str:
    """The script with which bash on a login node runs a command of Slurm.

    `variables`: those of the command's environment, besides those of the login shell. Other users cannot read them.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    dropped = " ".join(f"${{!{prefix}@}}" for prefix in _NOT_PASSED)
    return f"""\
conf=${{SLURM_CONF-}}
unset {dropped}
[ -z "$conf" ] || export SLURM_CONF="$conf"
{exports}exec {shlex.join(command)} << '{_END}'
{stdin}{_END}
"""
