"""Reads the tuner, the assessor or the advisor of an experiment file, and the objectives that they search for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from nni_manager.config import model
from nni_manager.config.algorithm import AssessorArgs, RandomArgs
from nni_manager.config.algorithms import (
    ASSESSORS,
    CLASS_ARGS,
    DEFAULT_FOR_SEVERAL,
    DEFAULT_TUNER,
    TUNERS,
    name_of,
    problems_within,
    reason_against_space,
)
from nni_manager.config.diagnostics import ref, shown
from nni_manager.config.reading import Reading
from nni_manager.config.registered_algorithms import AlgorithmSection
from nni_manager.config.schema import AnySchema, check
from nni_manager.config.search_space import SearchSpace
from nni_manager.config.user_class import OWN_KEYS, reason_against_class, user_class
from nni_manager.domain.objectives import OptimizeMode


class AlgorithmReading(Reading):
    """The part of a file that all platforms share and that names algorithms."""

    # ---- objectives

    @property
    def _objectives(self) -> list[Mapping[str, Any]]:
        """The objectives as written, as far as they are mappings."""
        written = self.raw.get("objectives")
        return [each for each in written if isinstance(each, Mapping)] if isinstance(written, list) else []

    def _mode_of(self, class_args: RandomArgs) -> OptimizeMode:
        """The mode of the first objective; without objectives, that of the tuner."""
        if not self._objectives:
            return class_args.optimize_mode
        return "minimize" if self._objectives[0].get("mode") == "minimize" else "maximize"

    def _mode_of_assessor(self, assessor: AssessorArgs, class_args: RandomArgs) -> OptimizeMode:
        """The mode in which a built-in assessor compares intermediate results. Objectives take precedence over its default."""
        is_default = "optimize_mode" not in assessor.model_fields_set
        mode = None if self._objectives and is_default else assessor.optimize_mode
        return mode or self._mode_of(class_args)

    def _check_objectives(self, class_args: RandomArgs | None, assessor_args: AssessorArgs | None) -> None:
        """Refuse what contradicts objectives, and algorithms that can have only one."""
        metrics = [each.get("metric") for each in self._objectives]
        for index, metric in enumerate(metrics):
            if metric is not None and metric in metrics[:index]:
                why = f"{shown(metric)} is an objective already; remove one of them"
                self.refuse(("objectives", index), why)
        if not metrics:
            return
        proposer = self._proposer
        if self._own(proposer) is None and class_args is not None:
            name = self._name_of(proposer)
            if len(metrics) > 1 and not TUNERS[name].has_several_objectives:
                several = [each for each in TUNERS.values() if each.has_several_objectives]
                others = ", ".join(each.name for each in sorted(several, key=lambda each: not each.learns))
                why = f"{name} can search for one objective only; use one of {others}, or your own class"
                self.refuse((proposer, "name"), why)
            if "optimize_mode" in class_args.model_fields_set:
                why = "«objectives» says what is maximized and minimized; remove optimize_mode"
                self.refuse((proposer, "classArgs", "optimize_mode"), why)
        if len(metrics) > 1 and assessor_args is not None and self._own("assessor") is None:
            why = (
                f"{self._name_of('assessor')} compares the intermediate results of one objective, and there are {len(metrics)}; "
                "remove it, use your own assessor, or keep one objective and write the others as constraints"
            )
            self.refuse(("assessor",), why)

    def _name_default_tuner(self) -> None:
        section = self.raw.get("tuner")
        name = DEFAULT_FOR_SEVERAL if len(self._objectives) > 1 else DEFAULT_TUNER
        if section is None and self.raw.get("advisor") is None:
            self.raw["tuner"] = {"name": name}
        elif (
            isinstance(section, dict) and section.get("name") is None and not any(map(section.get, OWN_KEYS))
        ):
            section["name"] = name

    def _name_algorithms(self) -> None:
        """Replace each spelling of a built-in algorithm's name by ours. The schema reports a damaged list of registered ones."""
        kinds: tuple[Literal["tuner", "advisor", "assessor"], ...] = ("tuner", "advisor", "assessor")
        for kind in kinds:
            section = self.raw.get(kind)
            if isinstance(section, dict) and isinstance(section.get("name"), str):
                with contextlib.suppress(PydanticCustomError):
                    section["name"] = name_of(kind, section["name"], section.get("classArgs"))

    @property
    def _proposer(self) -> Literal["tuner", "advisor"]:
        """The section of the tuner or advisor."""
        return "advisor" if self.raw.get("tuner") is None and self.raw.get("advisor") is not None else "tuner"

    def _class_args(self) -> RandomArgs | None:
        proposer = self._proposer
        for other in ("tuner", "assessor"):
            if self.raw.get("advisor") is not None and self.raw.get(other) is not None:
                why = f"an advisor replaces both tuner and assessor; remove {other} or advisor"
                self.report((other,), f"cannot use {ref((other,))} together with advisor: {why}")
        self._check_kind(proposer, DEFAULT_TUNER if proposer == "tuner" else "Hyperband")
        if self._own(proposer) is not None:
            # Arguments of a user's class are not checked; optimize_mode is read because nearly all classes have it.
            raw = self.within(proposer).get("classArgs")
            mode = raw.get("optimize_mode") if isinstance(raw, Mapping) else None
            return RandomArgs(optimize_mode="minimize" if mode == "minimize" else "maximize")
        return self._checked_args(proposer, CLASS_ARGS)

    def _checked_args(self, section: str, schemas: Mapping[str, type[AnySchema]]) -> AnySchema | None:
        """The arguments of a built-in algorithm; None without it, or if the schema of the file reports them."""
        name, raw = self.within(section).get("name"), self.within(section).get("classArgs")
        schema = schemas.get(name) if isinstance(name, str) else None
        if schema is None or not (raw is None or isinstance(raw, Mapping)):
            return None
        args, diagnostics = check(schema, raw or {}, self.document, (section, "classArgs"))
        self.diagnostics += diagnostics
        return args

    def _check_kind(self, kind: AlgorithmSection, example: str) -> None:
        """Report missing keys of a built-in algorithm or of the user's own class."""
        section = self.within(kind)
        is_there = isinstance(self.raw.get(kind), Mapping)
        if is_there and not any(section.get(key) for key in OWN_KEYS) and section.get("name") is None:
            message = (
                f"cannot do without «{kind}.name»: it must be the name of a built-in {kind}; write e.g. "
                f"«{kind}.name: {example}», or «{kind}.codeDirectory» and «{kind}.className» of your own class"
            )
            self.report((kind,), message)
        wrong = reason_against_class(kind, section, self._folder_of_class(kind))
        if wrong is not None:
            self.report((kind, wrong[0]), wrong[1])

    def _warn_of_directions(self, tuner: RandomArgs, assessor: AssessorArgs | None) -> None:
        """Name the direction that nobody has chosen, and an assessor that stops the better trials."""
        name, mode = self.within(self._proposer).get("name"), self._mode_of(tuner)
        is_chosen = "optimize_mode" in tuner.model_fields_set or self._objectives
        if isinstance(name, str) and name in TUNERS and TUNERS[name].learns and not is_chosen:
            key_path = ref((self._proposer, "classArgs", "optimize_mode"))
            self.warn(
                f"{name} will {mode} the results, its default, because {key_path} is not set; write maximize or minimize there"
            )
        assessor_name = str(self.within("assessor").get("name"))
        other = None if assessor is None else self._mode_of_assessor(assessor, tuner)
        if other not in (None, mode) and ASSESSORS[assessor_name].has_direction:
            key_path = ref(("assessor", "classArgs", "optimize_mode"))
            self.warn(
                f"{assessor_name} will {other} the results and the tuner will {mode} them, so the better trials will be stopped; "
                f"write {mode} as {key_path}"
            )

    def _warn_of_ignored_args(self, tuner: RandomArgs | None) -> None:
        for path, why in () if tuner is None else tuner.ignored():
            self.warn(f"{ref((self._proposer, 'classArgs', *path))} has no effect: {why}; remove it")

    def _check_warm_start(self, class_args: RandomArgs | None) -> None:
        if class_args is None or not class_args.warm_start:
            return
        proposer, name = self._proposer, self._name_of(self._proposer)
        if name in TUNERS and TUNERS[name].adds_parameters:
            why = f"{name} adds parameters to those of the search space, which earlier trials lack; remove warmStart"
            self.refuse((proposer, "classArgs", "warmStart"), why)

    def _warn_of_timeouts_of_built_ins(self) -> None:
        for section in ("tuner", "assessor", "advisor"):
            keys = self.within(section)
            if keys.get("callTimeout") is not None and not any(keys.get(key) for key in OWN_KEYS):
                self.warn(
                    f"{ref((section, 'callTimeout'))} has no effect: only your own class can exceed it; remove it"
                )

    def _folder_of_class(self, kind: AlgorithmSection) -> Path | None:
        """The folder of the user's own class; None if the file names none."""
        written = self.within(kind).get("codeDirectory")
        if not isinstance(written, str) or "\0" in written:
            return None
        return Path(os.path.abspath(self.path.parent / os.path.expanduser(written)))

    def _own(self, kind: AlgorithmSection, call_timeout_s: float | None = None) -> model.UserClass | None:
        section, here = self.within(kind), Path(os.path.abspath(self.path.parent))
        name = section.get("name")
        return user_class(kind, name, section, self._folder_of_class(kind) or here, call_timeout_s)

    def _name_of(self, section: str) -> str:
        return str(self.within(section).get("name") or self.within(section)["className"])

    def _check_search_space(self, space: SearchSpace) -> None:
        reason = reason_against_space(self._name_of(self._proposer), space)
        # The space is empty when annotations are not read.
        if reason is not None and space.parameters:
            self.report((self._proposer, "name"), reason)

    def _compare_initial_trials(self, space: SearchSpace, trials: list[dict[str, Any]]) -> None:
        """Warn of initial trials outside the search space; a person may know why."""
        for number, parameters in enumerate(trials if space.parameters else []):
            for problem in problems_within(space, self._name_of(self._proposer), parameters):
                self.warn(f"{ref(('initialTrials', number))} lies outside the search space: {problem}")
