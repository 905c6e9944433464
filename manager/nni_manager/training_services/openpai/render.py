"""Renders a job to images and scripts, one set per role. Pure: the same job gives the same scripts.

Source: microsoft/pai v1.8.1 (deployments and the first stage of templates), microsoft/openpai-runtime v0.1.12 (the rest).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from nni_manager.config.diagnostics import key_of
from nni_manager.training_services.openpai.job_checks import Path, ProtocolDiagnostic, ProtocolInvalid
from nni_manager.training_services.openpai.plugins import (
    TaskEnvironment,
    TaskScripts,
    scripts_of,
    variables_of,
)
from nni_manager.training_services.openpai.protocol import (
    JobProtocol,
    Prerequisite,
    ProtocolTaskRole,
)
from nni_manager.training_services.openpai.scalars import javascript_text
from nni_manager.training_services.openpai.templates import TemplateInvalid, fill_at_submission, fill_secrets
from trial_keeper.frozen_dataclass import dataclass

_HEAD = "#!/bin/bash\n\nset -o errexit\nset -o nounset\nset -o pipefail\n\n"


@dataclass(frozen=True, slots=True)
class RenderedRole:
    """A rendered role. `scripts` contain secrets."""

    role: ProtocolTaskRole
    image: str
    image_auth: Mapping[str, str] | None
    scripts: TaskScripts


@dataclass(frozen=True, slots=True)
class RenderedJob:
    """A rendered job. `warnings` are those of the protocol and of the templates."""

    protocol: JobProtocol
    roles: tuple[RenderedRole, ...]
    warnings: tuple[ProtocolDiagnostic, ...]


def render(job: JobProtocol, environment: TaskEnvironment | None = None) -> RenderedJob:
    """Returns the rendered roles of a job.

    Raises:
        ProtocolInvalid: a template cannot be filled in; has all diagnostics.
    """
    rendering = _Rendering(job, environment or TaskEnvironment())
    roles = tuple(rendering.role(role) for role in job.task_roles)
    if rendering.diagnostics:
        raise ProtocolInvalid(rendering.diagnostics)
    return RenderedJob(job, roles, tuple(dict.fromkeys((*job.warnings, *rendering.warnings))))


class _Rendering:
    """One pass over a job. It collects diagnostics and continues, so that one pass reports all of them."""

    def __init__(self, job: JobProtocol, environment: TaskEnvironment) -> None:
        self._job = job
        self._environment = environment
        self.diagnostics: list[ProtocolDiagnostic] = []
        self.warnings: list[ProtocolDiagnostic] = []

    def role(self, role: ProtocolTaskRole) -> RenderedRole:
        commands = fill_secrets(self._entry_point(role), self._job.secrets)
        self._warn_of_unknown(commands.unknown, ("taskRoles", role.name, "commands"))
        scripts = scripts_of(self._job, role, self._environment, f"{_HEAD}{commands.text}\n")
        self.diagnostics += scripts.diagnostics
        self.warnings += scripts.warnings
        image = self._job.prerequisite(role.docker_image, "dockerimage")
        return RenderedRole(role, str(image.values["uri"]), self._auth(image), scripts)

    def _entry_point(self, role: ProtocolTaskRole) -> str:
        """Returns the commands with those of the deployment as one script, so that a failing line ends all of it."""
        commands = list(_commands_of(self._job, role))
        text = "\n".join(command for _, command in commands)
        try:
            filled = fill_at_submission(text, variables_of(self._job, role))
        except TemplateInvalid as error:
            path = _path_at(error.index, commands)
            self.diagnostics.append(self._job.document.invalid_value(path, error.problem))
            return text
        self._warn_of_unknown(filled.unknown, ("taskRoles", role.name, "commands"))
        return filled.text

    def _auth(self, image: Prerequisite) -> Mapping[str, str] | None:
        if "auth" not in image.values:
            return None
        index = self._job.prerequisites.index(image)
        auth: dict[str, str] = {}
        for key, value in image.values["auth"].items():
            path: Path = ("prerequisites", index, "auth", key)
            try:
                filled = fill_at_submission(javascript_text(value), {"$secrets": self._job.secrets})
            except TemplateInvalid as error:
                self.diagnostics.append(self._job.document.invalid_value(path, error.problem))
                continue
            self._warn_of_unknown(filled.unknown, path)
            auth[key] = filled.text
        return auth

    def _warn_of_unknown(self, names: Iterable[str], path: Path) -> None:
        for name in dict.fromkeys(names):
            message = f"{key_of(path)} contains <% {name} %>, which is not defined and stays as text; define it if needed"
            self.warnings.append(self._job.document.diagnostic(path, message))


def _commands_of(job: JobProtocol, role: ProtocolTaskRole) -> Iterator[tuple[Path, str]]:
    """Yields every command of a role with its path, in script order."""
    added = job.deployment.get(role.name, {})
    deployment: Path = ("deployments", job.deployment_index or 0, "taskRoles", role.name)
    parts: tuple[tuple[Path, Iterable[str]], ...] = (
        ((*deployment, "preCommands"), added.get("preCommands", ())),
        (("taskRoles", role.name, "commands"), role.commands),
        ((*deployment, "postCommands"), added.get("postCommands", ())),
    )
    for path, commands in parts:
        yield from (((*path, index), command.strip()) for index, command in enumerate(commands))


def _path_at(index: int, commands: Sequence[tuple[Path, str]]) -> Path:
    """Returns the path of the command that contains this index of the joined text."""
    for path, command in commands:
        if index <= len(command):
            return path
        index -= len(command) + 1  # the line feed between two
    return commands[-1][0]
