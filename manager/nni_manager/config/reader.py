"""Read and check an experiment file and the files that it names; report all diagnostics at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nni_manager.config.algorithms import ASSESSOR_ARGS, CLASS_ARGS, RandomArgs, reason_against_space
from nni_manager.config.annotated_code import read_code
from nni_manager.config.code_folder import CodeUnusable
from nni_manager.config.diagnostics import MAX_DIAGNOSTICS, ConfigInvalid, Diagnostic, key_of, shown
from nni_manager.config.document import Document, read_json, read_yaml
from nni_manager.config.framework_template import FrameworkTemplate, read_template
from nni_manager.config.kubernetes import (
    EXPERIMENTS,
    SECTION,
    AnyExperimentV1,
    FrameworkControllerExperimentV1,
    KubeflowExperimentV1,
    Place,
    kubernetes_of,
    paths_in,
    refuse_contradictions,
)
from nni_manager.config.model import (
    LOCAL_HOST,
    AssessorConfig,
    Expansion,
    ExperimentSpec,
    KubernetesConfig,
    LocalSpec,
    PaiConfig,
    ReuseConfig,
    TunerConfig,
    UserClass,
)
from nni_manager.config.registered_algorithms import AlgorithmKind
from nni_manager.config.schema import check, is_placeholder, with_camel_keys
from nni_manager.config.search_space import SearchSpace, read_search_space
from nni_manager.config.user_class import OWN_KEYS, reason_against_class, user_class
from nni_manager.config.v1 import (
    SECTIONS,
    UNSUPPORTED,
    ExperimentV1,
    LocalConfigV1,
    LocalExperimentV1,
    megabytes,
)
from nni_manager.config.v2 import DocumentV2, as_v1, is_v2, v2_hints

DEFAULT_LOG_DIR = Path("~/nni-experiments")
# `_absolute` refuses placeholders in these.
_PATHS_OF_THIS_MACHINE = (
    "codeDir",
    "nniManagerNFSMountPath",
    "paiConfigPath",
    "configPath",
    "privateRegistryAuthPath",
)


def read_experiment_file(path: Path, *, reads_code: bool = True) -> ExperimentSpec:
    """The experiment that `path` describes, ready to run: its search space is read, its code folder exists.

    Relative paths in the file are relative to its folder; `~` is the user's home. Without `reads_code` annotations are not
    read, and the search space of annotated code is empty.

    Raises:
        ConfigInvalid: with every error of the experiment file, of its search space and of annotations, in the order of lines.
    """
    return read_document(path, _document(path), reads_code=reads_code)


def read_document(path: Path, document: Document, *, reads_code: bool = True) -> ExperimentSpec:
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
        ConfigInvalid: with every wrong key and type, or because the file is in the second schema.
    """
    document = _document(path)
    if isinstance(document, DocumentV2):
        message = f"cannot convert {path.name}: it is in NNI's second schema; use it as it is"
        raise ConfigInvalid([Diagnostic(str(path), None, None, "", message)])
    reading = _Reading(path, document, reads_code=False)
    diagnostics = [*document.diagnostics, *reading.schema_diagnostics()]
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
    """One pass over one file: collects diagnostics and the paths that it made absolute."""

    def __init__(self, path: Path, document: Document, reads_code: bool) -> None:
        self.path = path
        self.reads_code = reads_code
        self.document = document
        platform = document.value.get(
            "trainingServicePlatform", document.value.get("training_service_platform")
        )
        self.is_on_pai = platform == "pai"
        self.schema: type[AnyExperimentV1] = (
            EXPERIMENTS.get(platform, LocalExperimentV1) if isinstance(platform, str) else LocalExperimentV1
        )
        self.raw: dict[str, Any] = with_camel_keys(self.schema, document.value)
        # A v2 file may contain the search space itself.
        self.space_here: Any = self.raw.pop("searchSpace", None) if isinstance(document, DocumentV2) else None
        self.diagnostics = list(document.diagnostics)
        self.expansions: list[Expansion] = []
        self.warnings: list[str] = list(document.warnings) if isinstance(document, DocumentV2) else []
        self.is_annotated = False

    def experiment(self) -> ExperimentSpec:
        """The experiment. Each step collects diagnostics and continues, so that one pass reports all of them."""
        file, diagnostics = self._check()
        self.diagnostics += diagnostics
        class_args = self._class_args()
        self._check_args_of_assessor()
        uses_annotation = self.raw.get("useAnnotation") is True
        if not uses_annotation:
            search_space_raw, search_space = self._search_space()
        code_dir = self._code_dir()
        log_dir = self._log_dir()
        self._refuse_reuse_keys_without_reuse()
        pai = self._pai() if self.is_on_pai else None
        place_of_jobs = self._check_kubernetes()
        if uses_annotation:
            excluded = (log_dir, None if pai is None else pai.storage)
            search_space_raw, search_space = self._annotated_space(
                code_dir, tuple(each for each in excluded if each is not None)
            )
            self._check_paths_of_annotated_code(code_dir, log_dir)
        if class_args is not None and search_space is not None:
            self._check_search_space(search_space)
        if self.diagnostics:
            raise ConfigInvalid(
                sorted(
                    self.diagnostics,
                    key=lambda each: (each.file != str(self.path), each.file, each.line or 0),
                )
            )
        # Without diagnostics every part exists; a missing part is a bug of ours.
        assert file is not None
        assert class_args is not None
        assert search_space is not None
        assert code_dir is not None
        assert log_dir is not None
        local = (isinstance(file, LocalExperimentV1) and file.local_config) or LocalConfigV1()
        kubernetes: KubernetesConfig | None = None
        if isinstance(file, FrameworkControllerExperimentV1 | KubeflowExperimentV1):
            kubernetes = kubernetes_of(file, *place_of_jobs)
        return ExperimentSpec(
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
            tuner=TunerConfig(
                name=self._name_of(*self._proposer),
                optimize_mode=class_args.optimize_mode,
                seed=class_args.seed,
                class_args=dict(self._within(self._proposer[0]).get("classArgs") or {}),
                include_intermediate_results=file.tuner is not None
                and file.tuner.include_intermediate_results,
                own=None if file.tuner is None else self._own("tuner", file.tuner.call_timeout),
            ),
            assessor=None
            if file.assessor is None
            else AssessorConfig(
                self._name_of("assessor", "builtinAssessorName"),
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
            local=LocalSpec(local.gpu_indices, local.max_trial_num_per_gpu, local.use_active_gpu),
            reuse=self._reuse(file, self._within(SECTIONS[self.platform][0]).get("reuse") is True),
            config_path=Path(os.path.abspath(self.path)),
            expansions=tuple(self.expansions),
            pai=pai,
            is_annotated=self.is_annotated,
            warnings=tuple(self.warnings),
            kubernetes=kubernetes,
        )

    def schema_diagnostics(self) -> list[Diagnostic]:
        """The diagnostics of keys and types only."""
        return self._check()[1]

    def _check(self) -> tuple[AnyExperimentV1 | None, list[Diagnostic]]:
        words = {} if isinstance(self.document, DocumentV2) else v2_hints()
        file, diagnostics = check(self.schema, self.raw, self.document, answers=words)
        return file, self._without_other_platforms(diagnostics)

    @property
    def platform(self) -> Literal["local", "pai", "frameworkcontroller", "kubeflow"]:
        """The platform of a file without diagnostics."""
        found: Literal["local", "pai", "frameworkcontroller", "kubeflow"] = self.raw[
            "trainingServicePlatform"
        ]
        return found

    def _refuse_reuse_keys_without_reuse(self) -> None:
        platform = next(name for name, schema in EXPERIMENTS.items() if schema is self.schema)
        section = SECTIONS[platform][0]
        if self._within(section).get("reuse") is True:
            return
        for key in ("reuseIdleTimeout", "maxTrialsPerJob", "warmImports"):
            if self.raw.get(key):
                self._refuse(
                    (key,), f"cannot use {key}: only a job that runs many trials in turn has a use for it; "
                    f"write {section}: {{reuse: true}} as well, or remove it"
                )  # fmt: skip

    def _reuse(self, file: ExperimentV1, is_on: bool) -> ReuseConfig:
        timeout_s = file.reuse_idle_timeout
        return ReuseConfig(
            is_on,
            ReuseConfig().idle_timeout_s if timeout_s is None else timeout_s,
            file.max_trials_per_job,
            tuple(file.warm_imports),
        )

    # ---- Kubernetes

    def _check_kubernetes(self) -> tuple[dict[Place, Path], FrameworkTemplate | None]:
        """The paths for jobs on Kubernetes, and the Framework template; None without one."""
        if self.schema not in (FrameworkControllerExperimentV1, KubeflowExperimentV1):
            return {}, None
        platform = "kubeflow" if self.schema is KubeflowExperimentV1 else "frameworkcontroller"
        name = SECTION[platform]
        trial, section = self._within("trial"), self._within(name)
        refuse_contradictions(platform, trial, section, self._refuse)
        self._refuse_placeholders("trial", name)
        paths = {}
        for place, written in paths_in(trial, section, name):
            path = self._absolute(key_of(place), written, place)
            if path is not None:
                paths[place] = path
                self._refuse_absent(place, path)
        template = paths.get((name, "configPath"))
        if template is None or not template.is_file():
            return paths, None
        if trial.get("taskRoles") is not None:
            self._warn(f"{name}.configPath wins over trial.taskRoles: jobs are those of the template")
        try:
            return paths, read_template(read_yaml(template), section.get("namespace"))
        except ConfigInvalid as error:
            self.diagnostics += error.diagnostics
            return paths, None

    def _refuse_absent(self, place: Place, path: Path) -> None:
        is_folder = place[-1] == "path"
        if path.is_dir() if is_folder else path.is_file():
            return
        noun = "folder" if is_folder else "file"
        what = f"{path} is not a {noun}" if path.exists() else f"there is no {noun} {path}"
        self._refuse(place, f"cannot use {key_of(place)}: {what}; create it or fix the path")

    # ---- OpenPAI

    def _pai(self) -> PaiConfig | None:
        """The cluster and its jobs; None after an error, which is in `diagnostics`."""
        before = len(self.diagnostics)
        trial, cluster = self._within("trial"), self._within("paiConfig")
        self._refuse_missing(trial, cluster)
        self._refuse_placeholders("trial", *(() if _is_local(cluster) else ("paiConfig",)))
        self._refuse_login(cluster)
        storage = self._absolute("trial.nniManagerNFSMountPath", trial.get("nniManagerNFSMountPath"))
        # The local cluster creates its own storage.
        is_to_be_made = _is_local(cluster) and storage is not None and not storage.exists()
        if (
            storage is not None
            and not is_to_be_made
            and not (storage.is_dir() and os.access(storage, os.W_OK | os.X_OK))
        ):
            what = (
                f"there is no folder {storage}"
                if not storage.is_dir()
                else f"{storage} cannot be written by you"
            )
            self._refuse(
                ("trial", "nniManagerNFSMountPath"), f"cannot use trial.nniManagerNFSMountPath: {what}; mount the storage "
                "there, such as `sudo mount -t nfs4 SERVER:/pai/data FOLDER`, or fix the path"
            )  # fmt: skip
        job_file, job_text = self._job_file(trial)
        if len(self.diagnostics) > before or storage is None:
            return None

        def number(key: str) -> Any:
            return cluster.get(key) if trial.get(key) is None else trial[key]

        memory_mb = number("memoryMB")
        if isinstance(memory_mb, str):
            try:
                memory_mb = megabytes(memory_mb)
            except ValueError:
                return None  # the schema reports it

        return PaiConfig(
            host=cluster.get("host", ""),
            user=cluster.get("userName") or "",
            token=cluster.get("token"),
            password=cluster.get("passWord"),
            storage=storage,
            mount=str(trial.get("containerNFSMountPath", "")).rstrip("/") or "/",
            image=trial.get("image"),
            storage_name=trial.get("paiStorageConfigName"),
            virtual_cluster=trial.get("virtualCluster"),
            gpu=number("gpuNum"),
            cpu=number("cpuNum"),
            memory_mb=memory_mb,
            job_file=job_file,
            job_text=job_text,
        )

    def _refuse_missing(self, trial: Mapping[str, Any], cluster: Mapping[str, Any]) -> None:
        if trial.get("paiConfigPath") is not None or not trial:
            return
        examples = {
            "command": "python3 train.py",
            "image": "registry.example.com/me/train:1",
            "paiStorageConfigName": "confignfs-data",
            "gpuNum": "0",
            "cpuNum": "1",
            "memoryMB": "8192",
        }
        for key, example in examples.items():
            if trial.get(key) is None and cluster.get(key) is None:
                self._refuse(
                    ("trial", key), f"cannot do without trial.{key}: OpenPAI must know it of each job; write e.g. "
                    f"{key}: {example}, or name a job file in trial.paiConfigPath"
                )  # fmt: skip

    def _refuse_placeholders(self, *sections: str) -> None:
        """Refuse each placeholder that the user must replace. Commands are exempt: they may contain similar text."""
        told = {each.key for each in self.diagnostics}
        for section in sections:
            for place, value in _texts_in(self._within(section), (section,)):
                if self.document.diagnostic(place, "").key in told:
                    continue
                if place[-1] not in ("command", *_PATHS_OF_THIS_MACHINE) and is_placeholder(value):
                    self._refuse(
                        place,
                        f"cannot use {key_of(place)}: {value} is still the placeholder of an example; write your own",
                    )

    def _refuse_login(self, cluster: Mapping[str, Any]) -> None:
        if not cluster or _is_local(cluster):  # the local cluster has its own login
            return
        if cluster.get("userName") is None:
            self._refuse(
                ("paiConfig", "userName"), "cannot do without paiConfig.userName: it must be the name of your account there; "
                "write e.g. userName: ada"
            )  # fmt: skip
        given = [key for key in ("token", "passWord") if cluster.get(key) is not None]
        if len(given) == 1:
            return
        what = "there are both token and passWord" if given else "there is neither token nor passWord"
        self._refuse(
            ("paiConfig", *given[:1]), f"cannot log in with paiConfig: {what}; write one of them (the profile page on OpenPAI "
            "shows tokens; one for applications does not expire)"
        )  # fmt: skip

    def _job_file(self, trial: Mapping[str, Any]) -> tuple[Path | None, str | None]:
        path = self._absolute("trial.paiConfigPath", trial.get("paiConfigPath"))
        if path is None:
            return None, None
        try:
            return path, path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            self._refuse(
                ("trial", "paiConfigPath"), f"cannot read trial.paiConfigPath {path}: {why}; name an OpenPAI job file"
            )  # fmt: skip
            return path, None

    def _within(self, section: str) -> Mapping[str, Any]:
        found = self.raw.get(section)
        return found if isinstance(found, Mapping) else {}

    def _refuse(self, path: Place, message: str) -> None:
        self.diagnostics.append(self.document.diagnostic(path, message))

    def _without_other_platforms(self, diagnostics: list[Diagnostic]) -> list[Diagnostic]:
        """The diagnostics without those of an unsupported platform's sections: one about the platform is enough."""
        platform = self.raw.get("trainingServicePlatform")
        keys = SECTIONS[platform] if isinstance(platform, str) and platform in UNSUPPORTED else ()
        return [each for each in diagnostics if not (keys and each.key.split(".")[0] in (*keys, "trial"))]

    @property
    def _proposer(self) -> tuple[str, str]:
        """The section of the tuner or advisor, and its key with the name."""
        is_advised = self.raw.get("tuner") is None and self.raw.get("advisor") is not None
        return ("advisor", "builtinAdvisorName") if is_advised else ("tuner", "builtinTunerName")

    def _class_args(self) -> RandomArgs | None:
        section, key = self._proposer
        if self.raw.get(section) is None:
            self._refuse(
                ("tuner",), "cannot do without tuner: nothing else proposes parameters; write e.g. "
                "tuner: {builtinTunerName: TPE, classArgs: {optimize_mode: maximize}}"
            )  # fmt: skip
        for other in ("tuner", "assessor"):
            if self.raw.get("advisor") is not None and self.raw.get(other) is not None:
                self._refuse(
                    (other,), f"cannot use {other} beside advisor: an advisor does the work of both tuner and assessor; "
                    f"remove {other} or advisor"
                )  # fmt: skip
        if section == "tuner":
            self._check_kind("tuner", "TPE")
        proposer = self._within(section)
        name, raw = proposer.get(key), proposer.get("classArgs")
        if section == "tuner" and self._own("tuner") is not None:
            # Arguments of a user's class are not checked; optimize_mode is read because nearly all classes have it.
            mode = raw.get("optimize_mode") if isinstance(raw, Mapping) else None
            return RandomArgs(optimize_mode=mode if mode in ("maximize", "minimize") else "maximize")
        schema = CLASS_ARGS.get(name) if isinstance(name, str) else None
        if schema is None or not (raw is None or isinstance(raw, Mapping)):
            return None  # the schema of the file reports it
        class_args, diagnostics = check(schema, raw or {}, self.document, (section, "classArgs"))
        self.diagnostics += diagnostics
        return class_args

    def _check_kind(self, kind: AlgorithmKind, example: str) -> None:
        """Report missing keys of a built-in algorithm or of the user's own class."""
        section, built_in = self._within(kind), f"builtin{kind.capitalize()}Name"
        if (
            isinstance(self.raw.get(kind), Mapping)
            and section.get(built_in) is None
            and not any(section.get(key) for key in OWN_KEYS)
        ):
            self._refuse(
                (kind,), f"cannot do without {kind}.{built_in}: it must be the name of a built-in {kind}; write e.g. "
                f"{built_in}: {example}, or codeDir, classFileName and className of one of your own"
            )  # fmt: skip
        wrong = reason_against_class(kind, section, self._folder_of_class(kind))
        if wrong is not None:
            self._refuse((kind, wrong[0]), wrong[1])

    def _folder_of_class(self, kind: AlgorithmKind) -> Path | None:
        """The folder of the user's own class; None if the file names none."""
        written = self._within(kind).get("codeDir")
        if not isinstance(written, str) or "\0" in written:
            return None
        return Path(os.path.abspath(self.path.parent / Path(written).expanduser()))

    def _own(self, kind: AlgorithmKind, call_timeout_s: float | None = None) -> UserClass | None:
        name = self._within(kind).get(f"builtin{kind.capitalize()}Name")
        here = Path(os.path.abspath(self.path.parent))
        return user_class(kind, name, self._within(kind), self._folder_of_class(kind) or here, call_timeout_s)

    def _name_of(self, section: str, key: str) -> str:
        return str(self._within(section).get(key) or self._within(section)["className"])

    def _check_args_of_assessor(self) -> None:
        self._check_kind("assessor", "Medianstop")
        assessor = self._within("assessor")
        name, raw = assessor.get("builtinAssessorName"), assessor.get("classArgs")
        schema = ASSESSOR_ARGS.get(name) if isinstance(name, str) else None
        if schema is not None and (raw is None or isinstance(raw, Mapping)):
            _, diagnostics = check(schema, raw or {}, self.document, ("assessor", "classArgs"))
            self.diagnostics += diagnostics

    def _check_search_space(self, space: SearchSpace) -> None:
        section, key = self._proposer
        reason = reason_against_space(self._name_of(section, key), space)
        # The space is empty when annotations are not read.
        if reason is not None and space.parameters:
            self._refuse((section, key), reason)

    def _search_space(self) -> tuple[dict[str, Any], SearchSpace | None]:
        if self.space_here is not None:
            return self._search_space_here()
        written = self.raw.get("searchSpacePath")
        if written is None:
            self._refuse(
                    ("searchSpacePath",), "cannot do without searchSpacePath: it must be the path of a JSON file; "
                "write e.g. searchSpacePath: search_space.json"
            )  # fmt: skip
        path = self._absolute("searchSpacePath", written)
        if path is None:
            return {}, None
        if not path.exists():
            self._refuse(
                ("searchSpacePath",),
                f"cannot use searchSpacePath: there is no {path}; create it or fix the path",
            )
            return {}, None
        try:
            # Messages show the path relative to the experiment file's path as the user typed it.
            shown_path = self.path.parent / Path(str(written)).expanduser()
            document = (read_yaml if path.suffix in (".yml", ".yaml") else read_json)(shown_path)
        except ConfigInvalid as error:
            self.diagnostics += error.diagnostics
            return {}, None
        space, problems = read_search_space(document.value)
        self.diagnostics += document.diagnostics
        self.diagnostics += [
            document.diagnostic(place, message) for place, message in problems[:MAX_DIAGNOSTICS]
        ]
        return document.value, space

    def _search_space_here(self) -> tuple[dict[str, Any], SearchSpace | None]:
        assert isinstance(self.document, DocumentV2)
        place = ("searchSpace",)
        if self.raw.get("searchSpacePath") is not None:
            both = "cannot use searchSpace: there is searchSpaceFile, too; keep one of the two"
            self.diagnostics.append(self.document.said(place, both))
        space, problems = read_search_space(self.space_here)
        self.diagnostics += [
            self.document.said((*place, *where), message) for where, message in problems[:MAX_DIAGNOSTICS]
        ]
        return self.space_here, space

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
            self._refuse(("trial", "codeDir"), str(error))
            return {}, None
        self.diagnostics += code.diagnostics
        self.is_annotated = bool(code.generated)
        if code.diagnostics:
            return {}, None
        beside = "searchSpace" if self.space_here is not None else "searchSpacePath"
        is_beside = self.space_here is not None or self.raw.get("searchSpacePath") is not None
        if code.space:
            if is_beside:
                self._warn(
                    f"useAnnotation: true wins over {beside}: the search space is that of the annotations in trial.codeDir"
                )
            return dict(code.space), read_search_space(dict(code.space))[0]
        if is_beside:
            self._warn(
                f"useAnnotation: true finds no annotation that names a hyper-parameter: {beside} is the search space"
            )
            return self._search_space()
        self._refuse(
            ("useAnnotation",), f"cannot use useAnnotation: true: no annotation in {code_dir} names a hyper-parameter; write "
            "'''@nni.variable(nni.choice(16, 32), name=size)''' above `size = 16`, or searchSpacePath: search_space.json"
        )  # fmt: skip
        return {}, None

    def _check_paths_of_annotated_code(self, code_dir: Path | None, log_dir: Path | None) -> None:
        """Check paths for annotated code: experiments hold a copy of it, and trials start in that copy."""
        if not self.is_annotated or code_dir is None or log_dir is None:
            return
        if log_dir.exists() and log_dir.samefile(code_dir):
            self._refuse(
                ("logDir",), f"cannot use logDir: {log_dir} is trial.codeDir, too, of which each experiment keeps a copy; name "
                "another folder, which may lie in it"
            )  # fmt: skip
        command = self._within("trial").get("command")
        if isinstance(command, str) and str(code_dir) in command:
            self._warn(
                f"trial.command names {code_dir}, so trials may run the code there, without chosen values, and not its copy; "
                "write paths relative to trial.codeDir"
            )

    def _warn(self, message: str) -> None:
        # `diagnostic` translates the keys for files of v2.
        self.warnings.append(self.document.diagnostic((), message).message)

    def _code_dir(self) -> Path | None:
        trial = self.raw.get("trial")
        path = self._absolute("trial.codeDir", trial.get("codeDir") if isinstance(trial, Mapping) else None)
        if path is not None and not path.is_dir():
            what = f"{path} is not a folder" if path.exists() else f"there is no folder {path}"
            self._refuse(("trial", "codeDir"), f"cannot use trial.codeDir: {what}; create it or fix the path")
        return path

    def _log_dir(self) -> Path | None:
        path = (
            self._absolute("logDir", self.raw["logDir"])
            if "logDir" in self.raw
            else DEFAULT_LOG_DIR.expanduser()
        )
        if path is not None and path.exists() and not path.is_dir():
            self._refuse(("logDir",), f"cannot use logDir: {path} is not a folder; name a folder")
        return path

    def _absolute(self, key: str, written: Any, place: Place | None = None) -> Path | None:
        """The absolute path of a path in the file; None when it is not a path, which the schema reports."""
        if not isinstance(written, str) or not written:
            return None
        place = tuple(key.split(".")) if place is None else place
        if is_placeholder(written):
            self._refuse(
                place, f"cannot use {key}: {written} is still the placeholder of an example; write a path"
            )
            return None
        if "\0" in written:
            self._refuse(place, f"cannot use {key}: {shown(written)} holds a NUL character; fix the path")
            return None
        try:
            # Not resolve(): symbolic links stay as the user wrote them.
            absolute = Path(os.path.abspath(self.path.parent / Path(written).expanduser()))
        except RuntimeError as error:  # ~nobody
            self._refuse(place, f"cannot use {key}: {shown(written)} names no user; fix the path ({error})")
            return None
        try:
            absolute.exists()
        except OSError as error:  # a path that is too long, or a folder without permission
            self._refuse(place, f"cannot use {key}: {shown(written)}: {error.strerror}; fix the path")
            return None
        if str(absolute) != written:
            if isinstance(self.document, DocumentV2):
                key = self.document.key(place)
            self.expansions.append(Expansion(key, written, absolute))
        return absolute


def _texts_in(value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts_in(inner, (*place, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts_in(inner, (*place, index))


def _is_local(cluster: Mapping[str, Any]) -> bool:
    return str(cluster.get("host")).lower() == LOCAL_HOST
