"""MetisTuner: the best prediction of GPTuner's model or, more often, its largest expected improvement."""

from __future__ import annotations

from nni_manager.config.algorithm import BuiltInTuner
from nni_manager.config.schema import flag, must_be, whole
from nni_manager.tuner.flat_study import FlatStudy
from nni_manager.tuner.lazy import Floats
from nni_manager.tuner.model_sampler import ModelArgs
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import SamplerSeeds
from nni_manager.tuner.tuners.gp_tuner import GaussianProcess, GpArgs


class MetisArgs(ModelArgs):
    """classArgs of MetisTuner. `no_resampling` and `no_candidates` are accepted and have no effect."""

    no_resampling: bool = flag("true", True)
    no_candidates: bool = flag("false", False)
    selection_num_starting_points: int = whole(1, 5000, "600", 600)
    exploration_probability: float = must_be("a number from 0 to 1", "0.9", 0.9, ge=0, le=1)


class Metis(GaussianProcess):
    """Proposes the best predicted point or, with the exploration probability, the point of greatest expected improvement."""

    def __init__(self, seeds: SamplerSeeds, flat_study: FlatStudy, args: MetisArgs) -> None:
        super().__init__(
            seeds,
            flat_study,
            GpArgs(
                cold_start_num=args.cold_start_num,
                selection_num_starting_points=args.selection_num_starting_points,
            ),
        )
        self._explores = self.random.random() < args.exploration_probability

    def acquisition(self, points: Floats) -> Floats:
        """See `ModelSampler`."""
        return super().acquisition(points) if self._explores else -self.predict(points)[0]


DECLARED = BuiltInTuner("MetisTuner", __doc__, over_a_study(Metis, FlatStudy), MetisArgs, aliases=("Metis",))
