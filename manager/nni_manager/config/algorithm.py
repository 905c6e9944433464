"""What the file of a built-in tuner or assessor declares about it. `config.algorithms` has the table of all declarations.

Source: NNI v3.0 documentation of the built-in tuners. `seed` is our addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from nni_manager.config.schema import Schema, must_be
from nni_manager.config.search_space import SearchSpace
from nni_manager.domain.objectives import OptimizeMode
from trial_keeper.frozen_dataclass import dataclass


class RandomArgs(Schema):
    """classArgs of Random. NNI's Random has none; here `optimize_mode` determines the best trial."""

    model_config = ConfigDict(alias_generator=None)
    optimize_mode: OptimizeMode = must_be("maximize or minimize", "maximize", "maximize")
    seed: int | None = must_be("a whole number from 0 to 4294967295", "1", None, ge=0, le=2**32 - 1)
    warm_start: Literal["auto"] | list[str] | None = must_be(
        "auto, or a list of experiment ids and files of results", "auto", None, alias="warmStart"
    )

    def ignored(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """The arguments that are set and have no effect, by their paths, and why."""
        return ()


class MinimizingArgs(RandomArgs):
    """classArgs of a tuner that minimizes by default. Source: NNI v1.9 and v2.10, the tuners' code."""

    optimize_mode: OptimizeMode = must_be("maximize or minimize", "maximize", "minimize")


class AssessorArgs(Schema):
    """classArgs of an assessor. The default of `optimize_mode` is the tuner's."""

    model_config = ConfigDict(alias_generator=None)
    optimize_mode: OptimizeMode | None = must_be("maximize or minimize", "maximize", None)


class MaximizingArgs(AssessorArgs):
    """classArgs of an assessor that maximizes by default, whatever the tuner does. Source: NNI v1.9 and v2.10."""

    optimize_mode: OptimizeMode | None = must_be("maximize or minimize", "maximize", "maximize")


@dataclass(frozen=True, slots=True)
class Need:
    """A library that an algorithm requires besides Optuna.

    `module` is imported, `library` is its usual name, `extra` the pip extra, `instead` an alternative algorithm.
    """

    module: str
    library: str
    extra: str
    instead: str

    @property
    def is_met(self) -> bool:
        """True if the library is installed."""
        return find_spec(self.module) is not None


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in algorithm. The first line of `doc`, without its name, is in the documentation: what it proposes or stops.

    `make` creates it; see the subclasses. `origin`: whose name and arguments it has; empty: ours.
    """

    name: str
    doc: str | None
    make: Callable[..., Any]
    args: type[Schema]
    origin: Literal["NNI", "Optuna", ""] = "NNI"
    need: Need | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The folder of trials' checkpoints, as trials access it. `space_revision`: how often the search space has changed."""

    path: Path
    space_revision: int = 0

    def of_space(self, path: str | None) -> Path:
        """The folder for trials of the current search space, below `path` if the experiment file names one.

        The tuner of a changed space starts again, while trials of the former one may still write their checkpoints.
        """
        whole = Path(path or self.path)
        return whole / f"space-{self.space_revision}" if self.space_revision else whole


@dataclass(frozen=True, slots=True)
class BuiltInTuner(BuiltIn):
    """A built-in tuner. `make` takes the search space, `args`, the `CheckpointFolder` of trials, and the objectives."""

    args: type[RandomArgs] = RandomArgs
    aliases: tuple[str, ...] = ()
    """NNI 2.10's other names of it."""
    shares_name_of: str = ""
    """Another tuner with this name in NNI: this one is meant if an argument is one of this tuner's only."""
    is_advisor: bool = False
    """True if NNI calls it an advisor."""
    learns: bool = True
    """False: it learns nothing from results, so `optimize_mode` determines only the best trial."""
    learns_constraints: bool = False
    """True: it learns how far a result violates constraints. To other built-in tuners, such a trial counts as failed."""
    has_several_objectives: bool = False
    learns_curves: bool = False
    """True: it uses the intermediate results of trials that a pruner stops."""
    counts_failures: bool = False
    """True: a trial without a result counts as the worst one, and not as none."""
    adds_parameters: tuple[str, ...] = ()
    """The parameters that it adds to those of the search space. A trial that it does not propose would lack them."""
    in_space: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Returns a trial's parameters as parameters of the search space."""
    reason_against: Callable[[SearchSpace], str | None] = lambda space: None
    """Returns why it cannot use a search space, as a sentence; None when it can."""


@dataclass(frozen=True, slots=True)
class BuiltInAssessor(BuiltIn):
    """A built-in assessor. `make` takes the direction and `args`."""

    args: type[AssessorArgs] = AssessorArgs
    has_direction: bool = True
    """False: it compares no results, so `optimize_mode` has no effect."""
