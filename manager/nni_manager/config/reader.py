"""Read and check an experiment file and the files that it names; report all diagnostics at once.

One class reads a file: all checks share the list of diagnostics and the paths that are already absolute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nni_manager.config import model, openpai
from nni_manager.config.algorithms import ASSESSOR_ARGS, CLASS_ARGS, RandomArgs, reason_against_space
from nni_manager.config.annotated_code import read_code
from nni_manager.config.code_folder import CodeUnusable
from nni_manager.config.diagnostics import (
    MAX_DIAGNOSTICS,
    ConfigInvalid,
    Diagnostic,
    Place,
    key_of,
    leaves,
    shown,
)
from nni_manager.config.document import Document, read_json, read_yaml
from nni_manager.config.framework_template import FrameworkTemplate, read_template
from nni_manager.config.kubernetes import (
    EXPERIMENTS,
    SECTION,
    AnyExperimentV1,
    FrameworkControllerExperimentV1,
    KubeflowExperimentV1,
    kubernetes_of,
    paths_in,
    refuse_contradictions,
)
from nni_manager.config.registered_algorithms import AlgorithmKind
from nni_manager.config.schema import AnySchema, check, is_placeholder, with_camel_keys
from nni_manager.config.search_space import SearchSpace, read_search_space
from nni_manager.config.user_class import OWN_KEYS, reason_against_class, user_class
from nni_manager.config.v1 import (
    PATH_KEYS,
    SECTIONS,
    UNSUPPORTED,
    LocalConfigV1,
    LocalExperimentV1,
    PaiExperimentV1,
)
from nni_manager.config.v2 import DocumentV2, as_v1, is_v2, v2_hints

DEFAULT_LOG_DIR = Path("~/nni-experiments")


def read_experiment_file(path: Path, *, reads_code: bool = True) -> model.ExperimentSpec:
    """The experiment that `path` describes, ready to run: its search space is read, its code folder exists.

    Relative paths in the file are relative to its folder; `~` is the user's home. Without `reads_code` annotations are not
    read, and the search space of annotated code is empty.

    Raises:
        ConfigInvalid: with every error of the experiment file, of its search space and of annotations, in the order of lines.
    """
    return read_document(path, _document(path), reads_code=reads_code)


def read_document(path: Path, document: Document, *, reads_code: bool = True) -> model.ExperimentSpec:
    """The experiment that a document describes, checked as by `read_experiment_file`.

    `path` is the document's file; it need not exist.

    Raises:
        ConfigInvalid: with every error.
    """
    return _Reading(path, document, reads_code).experiment()


def schema_of(path: Path) -> Literal["v1", "v2"]:
    """The schema version of a file.

    Raises:
        ConfigInvalid: the file cannot be read.
    """
    return "v2" if isinstance(_document(path), DocumentV2) else "v1"


def read_first_schema(path: Path) -> dict[str, Any]:
    """The keys and values of a file in NNI's first schema, in camelCase. Only keys and types are checked.

    Raises:
        ConfigInvalid: a key or type is wrong, with every such error, or the file is in the second schema.
    """
    document = _document(path)
    if isinstance(document, DocumentV2):
        message = f"cannot convert {path.name}: it already is in NNI's second schema; use it unchanged"
        raise ConfigInvalid([Diagnostic(str(path), None, None, "", message)])
    reading = _Reading(path, document, reads_code=False)
    diagnostics = [*document.diagnostics, *reading.checked_keys()[1]]
    if diagnostics:
        raise ConfigInvalid(sorted(diagnostics, key=lambda each: each.line or 0))
    return reading.raw


def _document(path: Path) -> Document:
    document = read_yaml(path)
    if not isinstance(document.value, dict):
        message = (
            f"cannot use {path.name}: {shown(document.value)} is not a mapping; write lines of `key: value`"
        )
        raise ConfigInvalid([Diagnostic(str(path), 1, 1, "", message)])
    return as_v1(document) if is_v2(document.value) else document


class _Reading:
    """One pass over one file: collects diagnostics and absolute paths."""

    def __init__(self, path: Path, document: Document, reads_code: bool) -> None:
        self.path = path
        self.reads_code = reads_code
        self.document = document
        platform = document.value.get(
            "trainingServicePlatform", document.value.get("training_service_platform")
        )
        # The schema reports an unknown platform; the other keys are then checked as for this machine.
        self.platform: model.Platform = next((name for name in EXPERIMENTS if name == platform), "local")
        self.schema: type[AnyExperimentV1] = EXPERIMENTS[self.platform]
        self.raw: dict[str, Any] = with_camel_keys(self.schema, document.value)
        # A v2 file may contain the search space itself.
        self.space_here: Any = self.raw.pop("searchSpace", None) if isinstance(document, DocumentV2) else None
        self.diagnostics = list(document.diagnostics)
        self.expansions: list[model.Expansion] = []
        self.warnings: list[str] = list(document.warnings) if isinstance(document, DocumentV2) else []
        self.is_annotated = False

    def experiment(self) -> model.ExperimentSpec:
        """The experiment. Each step collects diagnostics and continues, so that one pass reports all of them."""
        file, diagnostics = self.checked_keys()
        self.diagnostics += diagnostics
        class_args = self._class_args()
        self._check_kind("assessor", "Medianstop")
        self._checked_args("assessor", ASSESSOR_ARGS)
        uses_annotation = self.raw.get("useAnnotation") is True
        if not uses_annotation:
            search_space_raw, search_space = self._search_space()
        code_dir = self._code_dir()
        log_dir = self._log_dir()
        self._refuse_reuse_keys_without_reuse()
        storage, job_file, job_text = self._check_pai() if self.platform == "pai" else (None, None, None)
        place_of_jobs = self._check_kubernetes()
        if uses_annotation:
            excluded = tuple(each for each in (log_dir, storage) if each is not None)
            search_space_raw, search_space = self._annotated_space(code_dir, excluded)
            self._check_paths_of_annotated_code(code_dir, log_dir)
        if class_args is not None and search_space is not None:
            self._check_search_space(search_space)
        if self.diagnostics:
            raise ConfigInvalid(
                sorted(self.diagnostics, key=lambda it: (it.file != str(self.path), it.file, it.line or 0))
            )
        # Without diagnostics every part exists; a missing part is a bug.
        assert file is not None
        assert class_args is not None
        assert search_space is not None
        assert code_dir is not None
        assert log_dir is not None
        local = (isinstance(file, LocalExperimentV1) and file.local_config) or LocalConfigV1()
        pai: model.PaiConfig | None = None
        if isinstance(file, PaiExperimentV1):
            assert storage is not None
            pai = openpai.pai_of(file, storage, job_file, job_text)
        kubernetes: model.KubernetesConfig | None = None
        if isinstance(file, FrameworkControllerExperimentV1 | KubeflowExperimentV1):
            kubernetes = kubernetes_of(file, *place_of_jobs)
        return model.ExperimentSpec(
            experiment_name=file.experiment_name,
            author_name=file.author_name,
            description=file.description,
            trial_concurrency=file.trial_concurrency,
            max_exec_duration_s=file.max_exec_duration,
            max_trial_number=file.max_trial_num,
            max_trial_duration_s=file.max_trial_duration,
            max_trial_retry=file.max_trial_retry,
            training_service=self.platform,
            search_space=search_space,
            search_space_raw=search_space_raw,
            tuner=model.TunerConfig(
                name=self._name_of(self._proposer),
                optimize_mode=class_args.optimize_mode,
                seed=class_args.seed,
                class_args=dict(self._within(self._proposer).get("classArgs") or {}),
                include_intermediate_results=file.tuner is not None
                and file.tuner.include_intermediate_results,
                own=None if file.tuner is None else self._own("tuner", file.tuner.call_timeout),
            ),
            assessor=None
            if file.assessor is None
            else model.AssessorConfig(
                self._name_of("assessor"),
                file.assessor.class_args or {},
                self._own("assessor", file.assessor.call_timeout),
            ),
            # Roles and job files have their own commands.
            trial_command=""
            if kubernetes is not None or (pai is not None and pai.job_text is not None)
            else self._within("trial").get("command") or "",
            code_dir=code_dir,
            gpu_num=self._within("trial").get("gpuNum") if pai is None else pai.gpu,
            nni_manager_ip=file.nni_manager_ip,
            log_dir=log_dir,
            log_collection=file.log_collection,
            log_level=file.log_level,
            debug=file.debug,
            # A developer's build seldom has the version of the image, so debug turns the check off, as in NNI.
            version_check=not file.debug if file.version_check is None else file.version_check,
            local=model.LocalSpec(local.gpu_indices, local.max_trial_num_per_gpu, local.use_active_gpu),
            reuse=model.ReuseConfig(
                self._within(SECTIONS[self.platform][0]).get("reuse") is True,
                model.ReuseConfig().idle_timeout_s
                if file.reuse_idle_timeout is None
                else file.reuse_idle_timeout,
                file.max_trials_per_job,
                tuple(file.warm_imports),
            ),
            config_path=Path(os.path.abspath(self.path)),
            expansions=tuple(self.expansions),
            pai=pai,
            is_annotated=self.is_annotated,
            warnings=tuple(self.warnings),
            kubernetes=kubernetes,
        )

    def checked_keys(self) -> tuple[AnyExperimentV1 | None, list[Diagnostic]]:
        """The file, or None if a key or a type is invalid, and the diagnostics."""
        hints = {} if isinstance(self.document, DocumentV2) else v2_hints()
        file, diagnostics = check(self.schema, self.raw, self.document, answers=hints)
        return file, self._without_other_platforms(diagnostics)

    def _refuse_reuse_keys_without_reuse(self) -> None:
        section = SECTIONS[self.platform][0]
        if self._within(section).get("reuse") is True:
            return
        for key in ("reuseIdleTimeout", "maxTrialsPerJob", "warmImports"):
            if self.raw.get(key):
                why = f"it has an effect only if one job runs many trials; write {section}: {{reuse: true}} as well"
                self._refuse((key,), f"{why}, or remove it")

    # ---- Kubernetes

    def _check_kubernetes(self) -> tuple[dict[Place, Path], FrameworkTemplate | None]:
        """The paths for jobs on Kubernetes, and the Framework template; None without one."""
        if self.platform not in SECTION:
            return {}, None
        name = SECTION[self.platform]
        trial, section = self._within("trial"), self._within(name)
        refuse_contradictions(self.platform, trial, section, self._refuse)
        self._refuse_placeholders("trial", name)
        paths = {}
        for place, written in paths_in(trial, section, name):
            path = self._absolute(place, written)
            if path is not None:
                paths[place] = path
                self._refuse_absent(place, path)
        template = paths.get((name, "configPath"))
        if template is None or not template.is_file():
            return paths, None
        if trial.get("taskRoles") is not None:
            self._warn(
                f"{name}.configPath takes precedence over trial.taskRoles: the template describes the jobs"
            )
        try:
            return paths, read_template(read_yaml(template), section.get("namespace"))
        except ConfigInvalid as error:
            self.diagnostics += error.diagnostics
            return paths, None

    def _refuse_absent(self, place: Place, path: Path) -> None:
        is_folder = place[-1] in ("path", "codeDir")
        if path.is_dir() if is_folder else path.is_file():
            return
        noun = "folder" if is_folder else "file"
        what = f"{path} is not a {noun}" if path.exists() else f"there is no {noun} {path}"
        self._refuse(place, f"{what}; create it or fix the path")

    # ---- OpenPAI

    def _check_pai(self) -> tuple[Path | None, Path | None, str | None]:
        """The folder of the storage, and the job file with its text."""
        trial, cluster = self._within("trial"), self._within("paiConfig")
        is_local = openpai.is_on_local_openpai(cluster)
        openpai.refuse_missing(trial, cluster, self._refuse)
        self._refuse_placeholders("trial", *(() if is_local else ("paiConfig",)))
        wrong = None if is_local else openpai.reason_against_login(cluster, self._refuse)
        if wrong is not None:
            self._report(*wrong)
        place = ("trial", "nniManagerNFSMountPath")
        storage = self._absolute(place, trial.get(place[-1]))
        if storage is not None and (why := openpai.reason_against_storage(storage, is_local)) is not None:
            self._refuse(place, why)
        return storage, *self._job_file(trial.get("paiConfigPath"))

    def _refuse_placeholders(self, *sections: str) -> None:
        """Refuse each placeholder that the user must replace. Commands are exempt: they may contain similar text."""
        reported = {each.key for each in self.diagnostics}
        for section in sections:
            for place, value in leaves(self._within(section), (section,)):
                is_exempt = place[-1] in ("command", *PATH_KEYS) or not is_placeholder(value)
                if not is_exempt and self.document.diagnostic(place, "").key not in reported:
                    self._refuse(place, f"{value} is a placeholder of an example; replace it")

    def _job_file(self, written: Any) -> tuple[Path | None, str | None]:
        place = ("trial", "paiConfigPath")
        path = self._absolute(place, written)
        if path is None:
            return None, None
        try:
            return path, path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            message = f"cannot read trial.paiConfigPath {path}: {why}; name an OpenPAI job file"
            self._report(place, message)
            return path, None

    def _within(self, section: str) -> Mapping[str, Any]:
        found = self.raw.get(section)
        return found if isinstance(found, Mapping) else {}

    def _refuse(self, place: Place, why: str, cannot: str = "use") -> None:
        """Record an error of a key; `why` ends with the remedy."""
        self._report(place, f"cannot {cannot} {key_of(place)}: {why}")

    def _report(self, place: Place, message: str) -> None:
        self.diagnostics.append(self.document.diagnostic(place, message))

    def _without_other_platforms(self, diagnostics: list[Diagnostic]) -> list[Diagnostic]:
        """The diagnostics without those of an unsupported platform's sections: one about the platform is enough."""
        platform = self.raw.get("trainingServicePlatform")
        keys = SECTIONS[platform] if isinstance(platform, str) and platform in UNSUPPORTED else ()
        return [each for each in diagnostics if not (keys and each.key.split(".")[0] in (*keys, "trial"))]

    @property
    def _proposer(self) -> Literal["tuner", "advisor"]:
        """The section of the tuner or advisor."""
        return "advisor" if self.raw.get("tuner") is None and self.raw.get("advisor") is not None else "tuner"

    def _class_args(self) -> RandomArgs | None:
        proposer = self._proposer
        if self.raw.get(proposer) is None:
            example = "tuner: {builtinTunerName: TPE, classArgs: {optimize_mode: maximize}}"
            self._refuse(
                ("tuner",), f"it proposes the parameters of trials; write e.g. {example}", "do without"
            )
        for other in ("tuner", "assessor"):
            if self.raw.get("advisor") is not None and self.raw.get(other) is not None:
                why = "an advisor replaces both tuner and assessor"
                self._report(
                    (other,), f"cannot use {other} together with advisor: {why}; remove {other} or advisor"
                )
        if proposer == "tuner":
            self._check_kind("tuner", "TPE")
            if self._own("tuner") is not None:
                # Arguments of a user's class are not checked; optimize_mode is read because nearly all classes have it.
                raw = self._within("tuner").get("classArgs")
                mode = raw.get("optimize_mode") if isinstance(raw, Mapping) else None
                return RandomArgs(optimize_mode="minimize" if mode == "minimize" else "maximize")
        return self._checked_args(proposer, CLASS_ARGS)

    def _checked_args(self, section: str, schemas: Mapping[str, type[AnySchema]]) -> AnySchema | None:
        """The arguments of a built-in algorithm; None without it, or if the schema of the file reports them."""
        name, raw = self._within(section).get(_built_in(section)), self._within(section).get("classArgs")
        schema = schemas.get(name) if isinstance(name, str) else None
        if schema is None or not (raw is None or isinstance(raw, Mapping)):
            return None
        args, diagnostics = check(schema, raw or {}, self.document, (section, "classArgs"))
        self.diagnostics += diagnostics
        return args

    def _check_kind(self, kind: AlgorithmKind, example: str) -> None:
        """Report missing keys of a built-in algorithm or of the user's own class."""
        section, built_in = self._within(kind), _built_in(kind)
        is_there = isinstance(self.raw.get(kind), Mapping)
        if is_there and not any(section.get(key) for key in OWN_KEYS) and section.get(built_in) is None:
            message = (
                f"cannot do without {kind}.{built_in}: it must be the name of a built-in {kind}; write e.g. {built_in}: "
                f"{example}, or codeDir, classFileName and className of your own class"
            )
            self._report((kind,), message)
        wrong = reason_against_class(kind, section, self._folder_of_class(kind))
        if wrong is not None:
            self._report((kind, wrong[0]), wrong[1])

    def _folder_of_class(self, kind: AlgorithmKind) -> Path | None:
        """The folder of the user's own class; None if the file names none."""
        written = self._within(kind).get("codeDir")
        if not isinstance(written, str) or "\0" in written:
            return None
        return Path(os.path.abspath(self.path.parent / Path(written).expanduser()))

    def _own(self, kind: AlgorithmKind, call_timeout_s: float | None = None) -> model.UserClass | None:
        section, here = self._within(kind), Path(os.path.abspath(self.path.parent))
        name = section.get(_built_in(kind))
        return user_class(kind, name, section, self._folder_of_class(kind) or here, call_timeout_s)

    def _name_of(self, section: str) -> str:
        return str(self._within(section).get(_built_in(section)) or self._within(section)["className"])

    def _check_search_space(self, space: SearchSpace) -> None:
        reason = reason_against_space(self._name_of(self._proposer), space)
        # The space is empty when annotations are not read.
        if reason is not None and space.parameters:
            self._report((self._proposer, _built_in(self._proposer)), reason)

    def _search_space(self) -> tuple[dict[str, Any], SearchSpace | None]:
        if self.space_here is not None:
            if self.raw.get("searchSpacePath") is not None:
                self._refuse(("searchSpace",), "searchSpaceFile is also set; keep one of the two")
            return self._checked_space(self.space_here, self.document, ("searchSpace",))
        place = ("searchSpacePath",)
        written = self.raw.get("searchSpacePath")
        if written is None:
            why = "it must be the path of a JSON file; write e.g. searchSpacePath: search_space.json"
            self._refuse(place, why, "do without")
        path = self._absolute(place, written)
        if path is None:
            return {}, None
        if not path.exists():
            self._refuse(place, f"there is no file {path}; create it or fix the path")
            return {}, None
        try:
            # Messages show the path as typed, relative to the experiment file.
            shown_path = self.path.parent / Path(str(written)).expanduser()
            document = (read_yaml if path.suffix in (".yml", ".yaml") else read_json)(shown_path)
        except ConfigInvalid as error:
            self.diagnostics += error.diagnostics
            return {}, None
        self.diagnostics += document.diagnostics
        return self._checked_space(document.value, document)

    def _checked_space(
        self, raw: Any, document: Document, above: Place = ()
    ) -> tuple[dict[str, Any], SearchSpace | None]:
        """The search space at a place of a document."""
        space, problems = read_search_space(raw)
        self.diagnostics += [
            document.diagnostic((*above, *at), message) for at, message in problems[:MAX_DIAGNOSTICS]
        ]
        return raw, space

    def _annotated_space(
        self, code_dir: Path | None, excluded: tuple[Path, ...]
    ) -> tuple[dict[str, Any], SearchSpace | None]:
        """The search space of the annotations; that of the experiment file if they name no hyper-parameter."""
        if not self.reads_code:
            return {}, SearchSpace({})
        if code_dir is None or not code_dir.is_dir():
            return {}, None  # already reported
        try:
            shown = self.path.parent / Path(str(self._within("trial")["codeDir"])).expanduser()
            code = read_code(code_dir, shown, excluded)
        except CodeUnusable as error:
            self._report(("trial", "codeDir"), str(error))
            return {}, None
        self.diagnostics += code.diagnostics
        self.is_annotated = bool(code.generated)
        if code.diagnostics:
            return {}, None
        beside = "searchSpace" if self.space_here is not None else "searchSpacePath"
        is_beside = self.space_here is not None or self.raw.get(beside) is not None
        if code.space:
            if is_beside:
                why = "the search space is that of the annotations in trial.codeDir"
                self._warn(f"useAnnotation: true takes precedence over {beside}: {why}")
            return dict(code.space), read_search_space(dict(code.space))[0]
        none = "declares a hyper-parameter"
        if is_beside:
            self._warn(
                f"useAnnotation: true has no effect, because no annotation {none}: {beside} is the search space"
            )
            return self._search_space()
        example = "'''@nni.variable(nni.choice(16, 32), name=size)''' above `size = 16`"
        message = (
            f"cannot use useAnnotation: true: no annotation in {code_dir} {none}; write {example}, or searchSpacePath: "
            "search_space.json"
        )
        self._report(("useAnnotation",), message)
        return {}, None

    def _check_paths_of_annotated_code(self, code_dir: Path | None, log_dir: Path | None) -> None:
        """Check paths for annotated code: each experiment contains a copy, in which trials start."""
        if not self.is_annotated or code_dir is None or log_dir is None:
            return
        if log_dir.exists() and log_dir.samefile(code_dir):
            why = f"{log_dir} is also trial.codeDir, which each experiment copies into logDir"
            self._refuse(("logDir",), f"{why}; choose another folder, such as a subfolder")
        command = self._within("trial").get("command")
        if isinstance(command, str) and str(code_dir) in command:
            self._warn(
                f"trial.command contains {code_dir}, so trials may run the original code, without chosen values; write "
                "paths relative to trial.codeDir"
            )

    def _warn(self, message: str) -> None:
        # `diagnostic` translates the keys for files of v2.
        self.warnings.append(self.document.diagnostic((), message).message)

    def _code_dir(self) -> Path | None:
        place = ("trial", "codeDir")
        path = self._absolute(place, self._within("trial").get("codeDir"))
        if path is not None:
            self._refuse_absent(place, path)
        return path

    def _log_dir(self) -> Path | None:
        if "logDir" not in self.raw:
            return DEFAULT_LOG_DIR.expanduser()
        path = self._absolute(("logDir",), self.raw["logDir"])
        if path is not None and path.exists() and not path.is_dir():
            self._refuse(("logDir",), f"{path} is not a folder; name a folder")
        return path

    def _absolute(self, place: Place, written: Any) -> Path | None:
        """The absolute path of a path in the file; None when it is not a path, which the schema reports."""
        if not isinstance(written, str) or not written:
            return None
        if is_placeholder(written):
            self._refuse(place, f"{written} is a placeholder of an example; write a path")
            return None
        if "\0" in written:
            self._refuse(place, f"{shown(written)} contains a NUL character; fix the path")
            return None
        try:
            # Not resolve(): symbolic links stay as the user wrote them.
            absolute = Path(os.path.abspath(self.path.parent / Path(written).expanduser()))
            absolute.exists()
        except RuntimeError as error:  # ~nobody
            self._refuse(place, f"the user in {shown(written)} is unknown; fix the path ({error})")
            return None
        except OSError as error:  # a path that is too long, or a folder without permission
            self._refuse(place, f"{shown(written)}: {error.strerror}; fix the path")
            return None
        if str(absolute) != written:
            key = self.document.key(place) if isinstance(self.document, DocumentV2) else key_of(place)
            self.expansions.append(model.Expansion(key, written, absolute))
        return absolute


def _built_in(section: str) -> str:
    """The key for the name of a built-in tuner, advisor or assessor."""
    return f"builtin{section.capitalize()}Name"
