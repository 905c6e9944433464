"""Read and check an experiment file and the files that it names; report all diagnostics at once.

One class reads a file: all checks share the list of diagnostics and the paths that are already absolute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nni_manager.config import model
from nni_manager.config.algorithm_reading import AlgorithmReading
from nni_manager.config.algorithms import ASSESSOR_ARGS
from nni_manager.config.annotated_code import read_code
from nni_manager.config.code_folder import CodeUnusable
from nni_manager.config.diagnostics import (
    MAX_DIAGNOSTICS,
    ConfigInvalid,
    Diagnostic,
    KeyPath,
    leaves,
    ref,
    shown,
)
from nni_manager.config.dialect import SERVICE
from nni_manager.config.document import Document, is_at_comment, read_json, read_yaml
from nni_manager.config.keys import ALGORITHMS
from nni_manager.config.platform_file import file_of
from nni_manager.config.platforms import PLATFORMS, THIS_MACHINE
from nni_manager.config.schema import check
from nni_manager.config.search_space import SearchSpace, is_json, read_search_space
from nni_manager.config.v1 import from_v1
from nni_manager.config.v2 import from_v2, is_v2

# Those that every sweep of W&B has.
_PROGRAMS = (".py", ".sh", ".ipynb")
_KEYS_OF_SWEEP = {"method", "parameters"}
DEFAULT_LOG_DIR = Path("~/nni-experiments")


def read_experiment_file(path: Path, *, reads_code: bool = True) -> model.ExperimentSpec:
    """The experiment that `path` describes, ready to run: its search space is read, its code folder exists.

    Relative paths in the file are relative to its folder; `~` is the user's home. Without `reads_code` annotations are not
    read, and the search space of annotated code is empty.

    Raises:
        ConfigInvalid: with every error of the experiment file, of its search space and of annotations, in the order of lines.
    """
    document = _mapping_of(path)
    if is_v2(document.value):
        return read_document(path, from_v2(document), reads_code=reads_code)
    return read_document(path, from_v1(document), reads_code=reads_code).replace(file_schema="v1")


def read_service_keys(path: Path, keys: Sequence[str]) -> list[Any]:
    """The values of these keys of `trainingService`, in the second schema, as the file has them; None for an absent key.

    Other parts of the file may have errors, and nothing that it names is read.

    Raises:
        ConfigInvalid: the file cannot be read, or one of these keys is wrong.
    """
    return service_keys(_in_second_schema(path), keys)


def service_keys(document: Document, keys: Sequence[str]) -> list[Any]:
    """The values of these keys in a document in the second schema, as from `read_service_keys`.

    Raises:
        ConfigInvalid: one of these keys is wrong.
    """
    schema = file_of(_platform_of(document)).schema
    names = {document.dialect.key((*SERVICE, key)) for key in keys}
    diagnostics = [*document.diagnostics, *check(schema, document.value, document)[1]]
    if wrong := [each for each in diagnostics if each.key in names]:
        raise ConfigInvalid(wrong)
    service = document.value.get("trainingService")
    return [service.get(key) if isinstance(service, Mapping) else None for key in keys]


def read_search_space_now(path: Path) -> tuple[Path, Any]:
    """The file that has the search space of an experiment file, perhaps that file itself, and the space in it.

    The space is empty if it cannot be read. Other parts of the experiment file may have errors.

    Raises:
        ConfigInvalid: the experiment file cannot be read.
    """
    reading = _ExperimentReading(path, _in_second_schema(path), reads_code=False)
    file = reading.absolute(("searchSpaceFile",), reading.raw.get("searchSpaceFile"))
    return file or path, reading._search_space()[0]


def read_document(path: Path, document: Document, *, reads_code: bool = True) -> model.ExperimentSpec:
    """The experiment that a document in the second schema describes, checked as by `read_experiment_file`.

    `path` is the document's file; it need not exist.

    Raises:
        ConfigInvalid: with every error.
    """
    return _ExperimentReading(path, document, reads_code).experiment()


def schema_of(path: Path) -> Literal["v1", "v2"]:
    """The schema version of a file.

    Raises:
        ConfigInvalid: the file cannot be read.
    """
    return "v2" if is_v2(_mapping_of(path).value) else "v1"


def read_first_schema(path: Path) -> dict[str, Any]:
    """The keys and values of a file in NNI's first schema, in the second. Only keys and types are checked.

    Raises:
        ConfigInvalid: a key or type is wrong, with every such error, or the file is in the second schema.
    """
    original = _mapping_of(path)
    if is_v2(original.value):
        message = f"cannot convert {path.name}: it already is in NNI's second schema; use it unchanged"
        raise ConfigInvalid([Diagnostic(str(path), None, None, "", message)])
    document = from_v1(original)
    diagnostics = [
        *document.diagnostics,
        *check(file_of(_platform_of(document)).schema, document.value, document)[1],
    ]
    if diagnostics:
        raise ConfigInvalid(sorted(diagnostics, key=lambda each: each.line or 0))
    return dict(document.value)


def _mapping_of(path: Path) -> Document:
    if path.suffix in _PROGRAMS:
        message = (
            f"cannot use {path.name}: it is a program; name an experiment file, in which `trial.command` runs the program: "
            "`nnictl help experiment-file`"
        )
        raise ConfigInvalid([Diagnostic(str(path), 1, 1, "", message)])
    document = read_yaml(path)
    if not isinstance(document.value, dict):
        message = (
            f"cannot use {path.name}: {shown(document.value)} is not a mapping; write lines of `key: value`"
        )
        raise ConfigInvalid([Diagnostic(str(path), 1, 1, "", message)])
    if document.value.keys() >= _KEYS_OF_SWEEP and not document.value.keys() & {"trial", "trialCommand"}:
        message = (
            f"cannot use {path.name}: it is a sweep of W&B; write an experiment file: `nnictl help from-wandb` "
            "has the same example in both forms"
        )
        raise ConfigInvalid([Diagnostic(str(path), 1, 1, "", message)])
    if document.value and all(isinstance(each, dict) and "_type" in each for each in document.value.values()):
        message = (
            f"cannot use {path.name}: it is a search space; name it as `searchSpacePath` in an experiment file: "
            "`nnictl help experiment-file`"
        )
        raise ConfigInvalid([Diagnostic(str(path), 1, 1, "", message)])
    return document


def _in_second_schema(path: Path) -> Document:
    original = _mapping_of(path)
    return from_v2(original) if is_v2(original.value) else from_v1(original)


def _platform_of(document: Document) -> str:
    """The platform of a document in the second schema; that of this machine if the platform is refused."""
    service = document.value.get("trainingService")
    platform = service.get("platform") if isinstance(service, Mapping) else None
    return platform if isinstance(platform, str) and platform in PLATFORMS else THIS_MACHINE


class _ExperimentReading(AlgorithmReading):
    """Reads a whole file; the platform's part is `platform`."""

    def __init__(self, path: Path, document: Document, reads_code: bool) -> None:
        self.row = PLATFORMS[_platform_of(document)]
        file = file_of(self.row.name)
        super().__init__(path, document, file.schema)
        self.reads_code = reads_code
        self._name_default_tuner()
        self._name_algorithms()
        self.platform = file(self)
        self.is_annotated = False

    def _refuse_other_than_json(self) -> None:
        """Refuse dates, bytes and infinities where any value may be: training code and classes of users get JSON."""
        reported = {each.key for each in self.diagnostics}
        open_values: dict[KeyPath, Any] = {("initialTrials",): self.raw.get("initialTrials")}
        for section in ALGORITHMS:
            open_values[section, "classArgs"] = self.within(section).get("classArgs")
        for above, values in open_values.items():
            for key_path, value in leaves(values, above):
                if not is_json(value) and self.document.dialect.key(key_path) not in reported:
                    why = f"{shown(value)} is not a JSON value; put it in quotes, or write a finite number"
                    self.refuse(key_path, why)

    def experiment(self) -> model.ExperimentSpec:
        """The experiment. Each step collects diagnostics and continues, so that one pass reports all of them."""
        file, diagnostics = check(self.platform.schema, self.document.value, self.document)
        self.diagnostics += diagnostics
        class_args = self._class_args()
        self._check_kind("assessor", "Medianstop")
        self._warn_of_timeouts_of_built_ins()
        self._warn_of_ignored_args(class_args)
        self._check_warm_start(class_args)
        assessor_args = self._checked_args("assessor", ASSESSOR_ARGS)
        self._refuse_other_than_json()
        if class_args is not None:
            self._warn_of_directions(class_args, assessor_args)
        uses_annotation = self.raw.get("useAnnotation") is True
        if not uses_annotation:
            search_space_raw, search_space = self._search_space()
        code_dir = self._code_dir()
        log_dir = self._log_dir()
        self._refuse_reuse_keys_without_reuse()
        self.platform.check()
        self._check_objectives(class_args, assessor_args)
        if uses_annotation:
            excluded = tuple(each for each in (log_dir, self.platform.storage) if each is not None)
            search_space_raw, search_space = self._annotated_space(code_dir, excluded)
            self._check_paths_of_annotated_code(code_dir, log_dir)
        if class_args is not None and search_space is not None:
            self._check_search_space(search_space)
            self._compare_initial_trials(search_space, [] if file is None else file.initial_trials)
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
        cluster = self.platform.cluster(file)
        proposer = file.tuner or file.advisor
        return model.ExperimentSpec.of(
            file,
            file_schema="v2",
            training_service=self.row.v1,
            search_space=search_space,
            search_space_raw=search_space_raw,
            tuner=model.TunerConfig(
                name=self._name_of(self._proposer),
                optimize_mode=self._mode_of(class_args),
                seed=class_args.seed,
                class_args=dict(self.within(self._proposer).get("classArgs") or {}),
                include_intermediate_results=file.tuner is not None
                and file.tuner.include_intermediate_results,
                own=None if proposer is None else self._own(self._proposer, proposer.call_timeout),
            ),
            assessor=None
            if file.assessor is None
            else model.AssessorConfig(
                self._name_of("assessor"),
                file.assessor.class_args or {},
                self._own("assessor", file.assessor.call_timeout),
                None if assessor_args is None else self._mode_of_assessor(assessor_args, class_args),
            ),
            # Roles and job files have their own commands.
            trial_command="" if cluster.has_commands else self.raw.get("trialCommand") or "",
            code_dir=code_dir,
            trial_gpu_number=cluster.trial_gpu_number(file.trial_gpu_number),
            log_dir=log_dir,
            # A developer's build seldom has the version of the image, so debug turns the check off, as in NNI.
            version_check=not file.debug if file.version_check is None else file.version_check,
            reuse_mode=file.training_service.reuse_mode,
            config_path=Path(os.path.abspath(self.path)),
            expansions=tuple(self.expansions),
            cluster=cluster,
            is_annotated=self.is_annotated,
            warnings=tuple(self.warnings),
        )

    def _refuse_reuse_keys_without_reuse(self) -> None:
        if self.service.get("reuseMode") is True:
            return
        for key in ("reuseIdleTimeout", "maxTrialsPerJob", "warmImports"):
            if self.raw.get(key):
                why = "it has an effect only if one job runs many trials; turn on «trainingService.reuseMode» as well"
                self.refuse((key,), f"{why}, or remove it")

    def _search_space(self) -> tuple[dict[str, Any], SearchSpace | None]:
        space = self.raw.get("searchSpace")
        written = self.raw.get("searchSpaceFile")
        if space is not None:
            if written is not None:
                self.refuse(("searchSpace",), "«searchSpaceFile» is also set; keep one of the two")
            return self._checked_space(space, self.document, ("searchSpace",))
        if written is None and self._own(self._proposer) is not None:
            return {}, SearchSpace({})
        if written is None:
            key, what, example = self.document.dialect.space
            self.refuse((key,), f"it must be {what}; write e.g. {ref((key,), example)}", "do without")
        key_path = ("searchSpaceFile",)
        path = self.absolute(key_path, written)
        if path is None:
            return {}, None
        if not path.exists():
            self.refuse(key_path, f"there is no file {path}; create it or fix the path")
            return {}, None
        # Messages show the path as typed, relative to the experiment file.
        shown_path = self.path.parent / Path(str(written)).expanduser()
        try:
            document = (read_yaml if path.suffix in (".yml", ".yaml") else read_json)(shown_path)
        except ConfigInvalid as error:
            lenient = self._as_yaml(shown_path, error)
            if lenient is None:
                self.diagnostics += error.diagnostics
                return {}, None
            document = lenient
        self.diagnostics += document.diagnostics
        return self._checked_space(document.value, document)

    def _as_yaml(self, path: Path, error: ConfigInvalid) -> Document | None:
        """The file if it is YAML, such as JSON with comments or a last comma. NNI reads both, whatever the file is called."""
        if not isinstance(error.__cause__, json.JSONDecodeError) or is_at_comment(error.__cause__):
            return None
        try:
            document = read_yaml(path)
        except ConfigInvalid:
            return None
        if not isinstance(document.value, Mapping):
            return None
        why = error.diagnostics[0].message.partition(": ")[2]
        self.warn(f"{path.name} is read as YAML, as in NNI, because it is {why}")
        return document

    def _checked_space(
        self, raw: Any, document: Document, above: KeyPath = ()
    ) -> tuple[dict[str, Any], SearchSpace | None]:
        """The search space at a key path of a document."""
        space, problems = read_search_space(raw, for_own_class=self._own(self._proposer) is not None)
        if raw and space is not None and not space.parameters:
            self.warn(
                "the search space has none of the built-in types: it is passed to the tuner's class unchecked"
            )
        for at, problem in problems[:MAX_DIAGNOSTICS]:
            within = f"cannot use {document.dialect.key(above)}." if above and at else "cannot use "
            message = problem.replace("cannot use ", within, 1)
            self.diagnostics.append(document.diagnostic((*above, *at), message))
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
            shown = self.path.parent / Path(str(self.raw["trialCodeDirectory"])).expanduser()
            code = read_code(code_dir, shown, excluded)
        except CodeUnusable as error:
            self.report(("trialCodeDirectory",), str(error))
            return {}, None
        self.diagnostics += code.diagnostics
        self.is_annotated = bool(code.generated)
        if code.diagnostics:
            return {}, None
        beside = next(
            (key for key in ("searchSpace", "searchSpaceFile") if self.raw.get(key) is not None), None
        )
        if code.space:
            if beside is not None:
                why = "the search space is that of the annotations in «trialCodeDirectory»"
                self.warn(f"«useAnnotation: true» takes precedence over {ref((beside,))}: {why}")
            return dict(code.space), read_search_space(dict(code.space))[0]
        none = "declares a hyper-parameter"
        if beside is not None:
            self.warn(
                f"«useAnnotation: true» has no effect, because no annotation {none}: {ref((beside,))} is the search space"
            )
            return self._search_space()
        example = "'''@nni.variable(nni.choice(16, 32), name=size)''' above `size = 16`"
        message = (
            f"cannot use «useAnnotation: true»: no annotation in {code_dir} {none}; write {example}, or "
            "«searchSpaceFile: search_space.json»"
        )
        self.report(("useAnnotation",), message)
        return {}, None

    def _check_paths_of_annotated_code(self, code_dir: Path | None, log_dir: Path | None) -> None:
        """Check the paths of annotated code. Trials start in a generated copy of the code in the experiment's folder."""
        if not self.is_annotated or code_dir is None or log_dir is None:
            return
        if log_dir.exists() and log_dir.samefile(code_dir):
            why = f"{log_dir} is also «trialCodeDirectory», which each experiment copies into it"
            self.refuse(("experimentWorkingDirectory",), f"{why}; choose another folder, such as a subfolder")
        command = self.raw.get("trialCommand")
        if isinstance(command, str) and str(code_dir) in command:
            self.warn(
                f"«trialCommand» contains {code_dir}, so trials may run the original code, without chosen values; write "
                "paths relative to «trialCodeDirectory»"
            )

    def _code_dir(self) -> Path | None:
        key_path = ("trialCodeDirectory",)
        path = self.absolute(key_path, self.raw.get("trialCodeDirectory"))
        if path is None:
            return None
        if os.fsencode(path).decode(errors="ignore") != str(path):
            self.refuse(key_path, f"{str(path)!a} is not UTF-8, as keepers need it; rename the folder")
        self.refuse_absent(key_path, path)
        return path

    def _log_dir(self) -> Path | None:
        key_path = ("experimentWorkingDirectory",)
        if key_path[0] not in self.raw:
            return DEFAULT_LOG_DIR.expanduser()
        path = self.absolute(key_path, self.raw[key_path[0]])
        if path is not None and path.exists() and not path.is_dir():
            self.refuse(key_path, f"{path} is not a folder; name a folder")
        return path
