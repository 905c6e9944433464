"""Renders a job of one or many trials in OpenPAI's job protocol. Pure: the same input gives the same text.

Each task runs one small script: it finds run.sh on the shared storage and starts it with the keeper's settings in its
environment. The keeper's token is a secret of the job, which OpenPAI fills in and never shows. If a job file describes
several task roles, each task's keeper runs its role's commands in place of the trial's command. A here-document holds these
commands: OpenPAI's templates work in it, and no quote in a command or in a filled-in value can end it.
"""

from __future__ import annotations

import copy
import hashlib
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from nni_manager.config.diagnostics import KeyPath, key_of
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.errors import UserError
from nni_manager.support.keeper_bundle import KeeperBundle
from nni_manager.training_services.openpai.document import read_document
from nni_manager.training_services.openpai.export import dumped, of_values
from nni_manager.training_services.openpai.job_checks import ProtocolDiagnostic, ProtocolInvalid
from nni_manager.training_services.openpai.protocol import JobProtocol, ProtocolTaskRole, parse
from nni_manager.training_services.openpai.render import render
from nni_manager.training_services.openpai.section import PaiConfig
from nni_manager.training_services.run_script import keeper_lookup_snippet
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import PREFIX, KeeperSettings

TOKEN_SECRET = "trial_keeper_token"
_IMAGE = "docker_image_0"
_ROLE = "taskrole"
_REUSED = "env-"
_ANY_NAME = "job"
# Source: the body limit of OpenPAI's REST server, 100 kB.
MAX_BYTES = 100 * 1024
# Reserved for what the manager adds to a job file.
_ADDED_BYTES = 4096


def job_prefix(experiment_id: str) -> str:
    """Returns the prefix of all job names of an experiment; no other job has it."""
    return f"nni_exp_{experiment_id}_"


def job_name(experiment_id: str, job_id: str) -> str:
    """The name of a job on OpenPAI. Source: NNI's page on OpenPAI; NNI v2.0 for jobs that are reused."""
    kind = "env" if job_id.startswith(_REUSED) else "trial"
    return f"{job_prefix(experiment_id)}{kind}_{job_id.removeprefix(_REUSED)}"


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """The common part of all jobs of an experiment: a job of any name, with the user's own commands.

    `has_own_commands`: the commands come from a job file, and keepers must run them.
    """

    job: JobProtocol
    has_own_commands: bool
    warnings: tuple[str, ...] = ()

    @property
    def completion(self) -> Completion:
        """The tasks of a job, and the rule by which they end its trial."""
        return Completion(
            tuple(
                TaskRole(role.name, role.instances, role.completion.min_failed, role.completion.min_succeeded)
                for role in self.job.task_roles
            )
        )

    @property
    def sized_roles(self) -> list[ProtocolTaskRole]:
        """The roles with resources in the job. HiveD derives the resources of other roles from their cell types."""
        scheduler = self.job.extras.get("hivedScheduler")
        by_sku = scheduler.get("taskRoles") if isinstance(scheduler, Mapping) else None
        skipped = [
            name for name, each in (by_sku or {}).items() if isinstance(each, Mapping) and each.get("skuType")
        ]
        return [role for role in self.job.task_roles if role.name not in skipped]


def template_of(pai: PaiConfig) -> JobTemplate:
    """Returns the template that the experiment file describes, with or without a job file.

    Raises:
        ProtocolInvalid: the job file is invalid; has all diagnostics.
        UserError: it exceeds OpenPAI's size limit.
    """
    if pai.job_text is None:
        return JobTemplate(of_values(_values_of(pai)), has_own_commands=False)
    file = "the job file" if pai.job_file is None else str(pai.job_file)
    job = parse(pai.job_text, file)
    _refuse_without_storage(job, pai)
    values = {**copy.deepcopy(job.document.value), "name": _ANY_NAME}
    retries = _remove_retries(values, job)
    changed = [each.path for each in retries]
    found = (*(each for each in render(job).warnings if each.path not in changed), *retries)
    warnings = (*map(str, found), *_idle_keys(pai, file))
    _fill_in(values, pai, has_storage=job.storages is not None)
    template = JobTemplate(of_values(values), has_own_commands=True, warnings=warnings)
    if len(template.job.document.text.encode()) > MAX_BYTES - _ADDED_BYTES:
        raise UserError(
            f"cannot submit {file}: it exceeds 96 kB, and OpenPAI accepts at most 100 kB; move long scripts to codeDir"
        )
    return template


def render_job(template: JobTemplate, name: str, settings: KeeperSettings) -> str:
    """Returns the job as YAML. `settings` are its keepers', with paths as containers see them."""
    values = copy.deepcopy(template.job.document.value)
    for role in values["taskRoles"].values():
        # A role without commands still has a keeper, which needs a command.
        own = "\n".join(text.strip() for text in role["commands"]) or "true"
        command = own if template.has_own_commands else None
        role["commands"] = [render_command(settings, command)]
    # The secrets come last: OpenPAI masks the lines from this key to the next one.
    secrets = {**values.pop("secrets", {}), TOKEN_SECRET: settings.token}
    first = {"protocolVersion": values["protocolVersion"], "name": name}
    return dumped({**first, **values, **first, "secrets": secrets})


def is_of_others(text: str, settings: KeeperSettings) -> bool:
    """True if a job of our name, as OpenPAI shows it, is certainly not from `render_job` for these keepers."""
    try:
        document = read_document(text).value
    except ProtocolInvalid:
        return False
    roles = document.get("taskRoles") if isinstance(document, dict) else None
    found = [role.get("commands") for role in (roles or {}).values() if isinstance(role, dict)]
    commands = [str(command) for each in found if isinstance(each, list) for command in each]
    environ = settings.to_environ()
    ours = [f"{name}={shlex.quote(environ[name])} \\" for name in (f"{PREFIX}WORKSPACE", f"{PREFIX}JOB_ID")]
    return bool(commands) and not any(all(line in command for line in ours) for command in commands)


def render_command(settings: KeeperSettings, command: str | None) -> str:
    """Returns the script of each task, which starts the keeper through run.sh. `command` is the task's own; None: the trial's."""
    run = shlex.quote(f"{settings.workspace}/run.sh")
    environ = settings.to_environ()
    del environ[f"{PREFIX}TOKEN"]
    lines = [
        "# The keeper handles a signal to all processes of the task and ends the trial; the shells wait for the keeper.",
        "trap : TERM INT HUP",
        f"[ -d {shlex.quote(settings.mount or '/')} ] || exit {int(KeeperExit.MOUNT_MISSING)}",
        f"[ -r {run} ] || {{ echo cannot read {run} in this container >&2; exit {int(KeeperExit.WORKSPACE)}; }}",
    ]
    if command is not None:
        # The hash keeps commands and filled-in values from containing this line by chance.
        end = f"END_OF_COMMAND_{hashlib.sha256(command.encode()).hexdigest()[:16]}"
        lines += [f"IFS= read -r -d '' trial_keeper_command <<'{end}' || true", command, end]
    lines += [f"{name}={shlex.quote(value)} \\" for name, value in environ.items()]
    lines.append(f"{PREFIX}TOKEN='<% $secrets.{TOKEN_SECRET} %>' \\")
    if command is not None:
        lines.append(f"{PREFIX}COMMAND=\"${{trial_keeper_command%$'\\n'}}\" \\")
    return "\n".join([*lines, f"bash {run}"])


def render_run_script(python: str | None = None, bundle: KeeperBundle | None = None) -> str:
    """Returns run.sh: it enters the workspace and runs the container's keeper.

    `python`, `bundle`: see `keeper_lookup_snippet`.
    """
    return f"""\
#!/bin/bash
# Started once per task; the TRIAL_KEEPER_* variables are the keeper's settings.
trap : TERM INT HUP
{keeper_lookup_snippet(python, bundle)}
"${{keeper[@]}}" "$@"
code=$?
# OpenPAI treats a code above 128 as its own failure, and would restart the job of a trial that has ended.
[ "$code" -le 128 ] || code=1
exit "$code"
"""


# ---- parts of a template


def _values_of(pai: PaiConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "protocolVersion": 2,
        "name": _ANY_NAME,
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
        # As NNI: OpenPAI's portal selects the job's page by this value.
        "extras": {"submitFrom": "submit-job-v2"},
    }
    _fill_in(values, pai, has_storage=False)
    return values


def _fill_in(values: dict[str, Any], pai: PaiConfig, *, has_storage: bool) -> None:
    """Copy virtual cluster and storage from the experiment file if the job has none."""
    if pai.virtual_cluster is not None:
        values["defaults"] = {"virtualCluster": pai.virtual_cluster} | (values.get("defaults") or {})
    extras = values.setdefault("extras", {})
    if pai.storage_name is not None and not has_storage:
        storage, mount = {"name": pai.storage_name}, PurePosixPath(pai.mount)
        # OpenPAI's default path is /mnt/<name>; containerNFSMountPath may be a folder below it.
        if PurePosixPath("/mnt", pai.storage_name) not in (mount, *mount.parents):
            storage["mountPath"] = pai.mount
        extras["storages"] = [storage]


def _remove_retries(values: dict[str, Any], job: JobProtocol) -> list[ProtocolDiagnostic]:
    """Set the job's retry counts to 0; returns a warning for each that was not.

    OpenPAI would rerun a trial whose end the manager has already decided. With 0 it still restarts what a lost node or an
    eviction has ended, without counting.
    """
    counted: dict[KeyPath, dict[str, Any]] = {("jobRetryCount",): values}
    counted |= {("taskRoles", name, "taskRetryCount"): role for name, role in values["taskRoles"].items()}
    warnings = []
    for path, holder in counted.items():
        count = str(path[-1])
        if holder.get(count):
            holder[count] = 0
            why = "has no effect: the manager decides which trials are retried"
            message = f"{key_of(path)} {why}; remove it, and write maxTrialRetry into the experiment file"
            warnings.append(job.document.diagnostic(path, message))
    return warnings


def _idle_keys(pai: PaiConfig, file: str) -> list[str]:
    keys = {"image": pai.image, "gpuNum": pai.gpu, "cpuNum": pai.cpu, "memoryMB": pai.memory_mb}
    return [
        f"trial.{key} has no effect: {file} sets it for each task role; remove one of the two"
        for key, value in keys.items()
        if value is not None
    ]


def _refuse_without_storage(job: JobProtocol, pai: PaiConfig) -> None:
    storages = job.storages
    if storages == () or (storages is None and pai.storage_name is not None):
        return  # the user's default storages, which are defined on the cluster, or the experiment file's storage
    if job.storage_at(pai.mount) is not None:
        return
    mounted = ", ".join(f"{storage.name} at {storage.mount_path}" for storage in storages or ())
    what = f"it mounts {mounted}, not {pai.mount}" if storages else "it mounts no storage"
    problem = (
        f"{what}, where containers access the experiment; write e.g. "
        f"storages: [{{name: {pai.storage_name or 'NAME'}, mountPath: {pai.mount}}}], or correct containerNFSMountPath"
    )
    raise ProtocolInvalid([job.document.invalid_value(("extras", "storages"), problem)])
