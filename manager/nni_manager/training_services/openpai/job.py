"""A trial's job, or one that runs many trials, as OpenPAI's job protocol has it. Pure: the same input gives the same text.

Each task of a job runs one small script: it looks for run.sh on the shared storage, and starts it with the keeper's settings in
its environment. The keeper's token is a secret of the job, which OpenPAI fills in and shows to nobody. Where a job file describes
several task roles, each task's keeper is given the commands of its role in place of the trial's command. They travel in a
here-document, so that OpenPAI's templates work in them as ever, and no quote in a command or in what is filled in can end them.
"""

from __future__ import annotations

import copy
import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from nni_manager.config.model import PaiConfig
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.errors import UserMistake
from nni_manager.training_services.openpai.export import dumped, of_values
from nni_manager.training_services.openpai.mistakes import Path, ProtocolInvalid
from nni_manager.training_services.openpai.protocol import JobProtocol, Storage, parse
from nni_manager.training_services.openpai.render import render
from nni_manager.training_services.run_script import finds_keeper
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import PREFIX, KeeperSettings

TOKEN_SECRET = "trial_keeper_token"
_IMAGE = "docker_image_0"
_ROLE = "taskrole"
_REUSED = "env-"
# Source: the body limit of OpenPAI's REST server, 100 kB.
MOST_BYTES = 100 * 1024
# What the manager adds to a job file.
_ADDED_BYTES = 4096


class JobTooLarge(UserMistake):
    """cannot submit the job: OpenPAI takes 100 kB at most; put long scripts into codeDir"""


def job_prefix(experiment_id: str) -> str:
    """What the names of all jobs of an experiment begin with, and no others'."""
    return f"nni_exp_{experiment_id}_"


def job_name(experiment_id: str, job_id: str) -> str:
    """The name of a job on OpenPAI. Source: NNI's page on OpenPAI; NNI v2.0 for jobs that are reused."""
    kind = "env" if job_id.startswith(_REUSED) else "trial"
    return f"{job_prefix(experiment_id)}{kind}_{job_id.removeprefix(_REUSED)}"


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """What all jobs of an experiment have in common. `values` is a job without a name, whose commands are the user's own.

    `has_own_commands`: they come from a job file, and the keepers must be given them.
    """

    values: Mapping[str, Any]
    has_own_commands: bool
    completion: Completion
    storages: tuple[Storage, ...]
    virtual_cluster: str
    warnings: tuple[str, ...] = ()

    def storage_at(self, mount: str) -> Storage | None:
        """The storage that containers see at this path or above it; None if only the cluster knows."""
        path = PurePosixPath(mount)
        seen = {PurePosixPath(storage.mount_path): storage for storage in self.storages}
        return next((seen[each] for each in (path, *path.parents) if each in seen), None)


def template_of(pai: PaiConfig) -> JobTemplate:
    """The template that the experiment file describes, by itself or with a job file.

    Raises:
        ProtocolInvalid: the job file cannot be used; with all that is wrong.
        JobTooLarge: OpenPAI would not take it.
    """
    if pai.job_text is None:
        return _template(_values_of(pai), has_own_commands=False)
    file = "the job file" if pai.job_file is None else str(pai.job_file)
    job = parse(pai.job_text, file)
    warnings = [str(warning) for warning in render(job).warnings]
    values = copy.deepcopy(dict(job.document.value))
    del values["name"]
    _refuse_without_storage(job, pai)
    _fill_in(values, pai, has_storage=job.storages is not None)
    warnings += _idle_keys(pai, file)
    if len(dumped(values).encode()) > MOST_BYTES - _ADDED_BYTES:
        raise JobTooLarge(
            f"cannot submit {file}: it is larger than 96 kB, and OpenPAI takes 100 kB at most; put long scripts into codeDir"
        )
    return replace(_template(values, has_own_commands=True), warnings=tuple(warnings))


def render_job(template: JobTemplate, name: str, settings: KeeperSettings) -> str:
    """The job as YAML. `settings` are those of its keepers, as the container sees paths."""
    values = copy.deepcopy(dict(template.values))
    for role in values["taskRoles"].values():
        # A role that does nothing still has a keeper, which must have something to run.
        own = "\n".join(text.strip() for text in role["commands"]) or "true"
        command = own if template.has_own_commands else None
        role["commands"] = [render_command(settings, command)]
    secrets = {**values.pop("secrets", {}), TOKEN_SECRET: settings.token}
    return dumped(
        {"protocolVersion": values.pop("protocolVersion"), "name": name, **values, "secrets": secrets}
    )


def render_command(settings: KeeperSettings, command: str | None) -> str:
    """What each task of a job runs: the keeper, found and started by run.sh. `command` is the task's own, if it has one."""
    run = shlex.quote(f"{settings.workspace}/run.sh")
    environ = settings.to_environ()
    del environ[f"{PREFIX}TOKEN"]
    lines = [
        "# A signal to all processes of the task is for the keeper, which ends the trial; the shells wait for it.",
        "trap : TERM INT HUP",
        f"[ -d {shlex.quote(settings.mount or '/')} ] || exit {int(KeeperExit.MOUNT_MISSING)}",
        f"[ -r {run} ] || {{ echo cannot read {run} in this container >&2; exit {int(KeeperExit.WORKSPACE)}; }}",
    ]
    if command is not None:
        # Nobody writes this line by chance, and no value that is filled in holds it.
        end = f"END_OF_COMMAND_{hashlib.sha256(command.encode()).hexdigest()[:16]}"
        lines += [f"IFS= read -r -d '' trial_keeper_command <<'{end}' || true", command, end]
    lines += [f"{name}={shlex.quote(value)} \\" for name, value in environ.items()]
    lines.append(f"{PREFIX}TOKEN='<% $secrets.{TOKEN_SECRET} %>' \\")
    if command is not None:
        lines.append(f"{PREFIX}COMMAND=\"${{trial_keeper_command%$'\\n'}}\" \\")
    return "\n".join([*lines, f"bash {run}"])


def render_run_script(python: str | None = None) -> str:
    """The content of run.sh: enters the workspace, and runs the keeper that the container has.

    `python`: one that has the keeper, on machines where tasks are no containers.
    """
    return f"""\
#!/bin/bash
# Started once per task; the TRIAL_KEEPER_* variables say what it is for.
trap : TERM INT HUP
{finds_keeper(python)}
"${{keeper[@]}}"
code=$?
# OpenPAI takes a code above 128 for a failure of its own, and would start a job again whose trial is over.
[ "$code" -le 128 ] || code=1
exit "$code"
"""


# ---- parts of a template


def _template(values: Mapping[str, Any], *, has_own_commands: bool) -> JobTemplate:
    job = of_values({"name": "job", **values})
    return JobTemplate(values, has_own_commands, _completion(job), job.storages or (), job.virtual_cluster)


def _values_of(pai: PaiConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "protocolVersion": 2,
        "type": "job",
        "jobRetryCount": 0,
        "prerequisites": [{"protocolVersion": 2, "name": _IMAGE, "type": "dockerimage", "uri": pai.image}],
        "taskRoles": {
            _ROLE: {
                "instances": 1,
                "completion": {"minFailedInstances": 1, "minSucceededInstances": -1},
                "taskRetryCount": 0,
                "dockerImage": _IMAGE,
                "resourcePerInstance": {"gpu": pai.gpu, "cpu": pai.cpu, "memoryMB": pai.memory_mb},
                "commands": ["true"],
            }
        },
        # As NNI has it: OpenPAI's portal chooses by it the page that shows the job.
        "extras": {"submitFrom": "submit-job-v2"},
    }
    _fill_in(values, pai, has_storage=False)
    return values


def _fill_in(values: dict[str, Any], pai: PaiConfig, *, has_storage: bool) -> None:
    """Where a job says nothing of its virtual cluster and storage, the experiment file does."""
    if pai.virtual_cluster is not None:
        values["defaults"] = {"virtualCluster": pai.virtual_cluster} | (values.get("defaults") or {})
    extras = values.setdefault("extras", {})
    if pai.storage_name is not None and not has_storage:
        extras["storages"] = [_storage(pai.storage_name, pai.mount)]


def _storage(name: str, mount: str) -> dict[str, str]:
    # OpenPAI's own place for it is /mnt/<name>; containerNFSMountPath may be a folder below that.
    usual = PurePosixPath("/mnt") / name
    is_usual = usual in (PurePosixPath(mount), *PurePosixPath(mount).parents)
    return {"name": name} if is_usual else {"name": name, "mountPath": mount}


def _idle_keys(pai: PaiConfig, file: str) -> list[str]:
    keys = {"image": pai.image, "gpuNum": pai.gpu, "cpuNum": pai.cpu, "memoryMB": pai.memory_mb}
    return [
        f"trial.{key} has no effect: {file} says it for each of its task roles; remove one of the two"
        for key, value in keys.items()
        if value is not None
    ]


def _refuse_without_storage(job: JobProtocol, pai: PaiConfig) -> None:
    path: Path = ("extras", "storages")
    storages = job.storages
    if storages == () or (storages is None and pai.storage_name is not None):
        return  # the user's default storages, which only the cluster knows; or the experiment file's
    mount = PurePosixPath(pai.mount)
    seen = [PurePosixPath(storage.mount_path) for storage in storages or ()]
    if any(each in (mount, *mount.parents) for each in seen):
        return
    what = f"it mounts {_listed(storages)}, not {pai.mount}" if storages else "it mounts no storage"
    message = (
        f"cannot use extras.storages: {what}, where containers would find the experiment; write e.g. "
        f"storages: [{{name: {pai.storage_name or 'NAME'}, mountPath: {pai.mount}}}], or correct containerNFSMountPath"
    )
    raise ProtocolInvalid([job.document.mistake(path, message)])


def _listed(storages: tuple[Storage, ...]) -> str:
    return ", ".join(f"{storage.name} at {storage.mount_path}" for storage in storages)


def _completion(job: JobProtocol) -> Completion:
    return Completion(
        tuple(
            TaskRole(role.name, role.instances, role.completion.min_failed, role.completion.min_succeeded)
            for role in job.task_roles
        )
    )
