"""The arguments of `search`: refuses unknown ones, and names its arguments in errors of the configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator

from nni_manager.config.diagnostics import ConfigInvalid, folded, nearest
from nni_manager.errors import UserError
from nni_manager.experiment.config import ExperimentConfig
from nni_manager.experiment.sections import LocalConfig

_TRIALS, _CONCURRENCY = "use its argument `trials`", "use its argument `concurrency`"
_SPACE, _TUNER, _ASSESSOR = (
    "use its argument `space`",
    "use its argument `tuner`",
    "use its argument `assessor`",
)
_DIRECTION = "maximize=True searches for large results; without it, small ones are better"
_TIME = "max_experiment_duration='10m' limits the search, max_trial_duration='1m' each trial"
_FOLDER = "each search is stored; experiment_working_directory chooses the folder"
_METRICS = (
    "the function returns its result; with several metrics it returns a dict, and "
    "objectives=[{'metric': 'loss', 'mode': 'minimize'}] names them"
)
_ANSWERS = {
    # Fields of `ExperimentConfig` that arguments of `search` replace, or that have no effect in a search.
    "searchspace": _SPACE,
    "searchspacefile": _SPACE,
    "maxtrialnumber": _TRIALS,
    "trialconcurrency": _CONCURRENCY,
    "trialcommand": "its trials call the function; remove it",
    "useannotation": "its trials call the function; remove it",
    "trialcodedirectory": "the function runs in the current directory; change that with os.chdir()",
    "trainingserviceplatform": "its trials run on this machine; remove it",
    # Names of Optuna, Ray Tune, W&B, Hyperopt and scikit-optimize.
    "objective": "use its argument `function`",
    "trainable": "use its argument `function`",
    "paramspace": _SPACE,
    "ntrials": _TRIALS,
    "numsamples": _TRIALS,
    "maxevals": _TRIALS,
    "maxiter": _TRIALS,
    "ncalls": _TRIALS,
    "njobs": _CONCURRENCY,
    "maxconcurrenttrials": _CONCURRENCY,
    "timeout": _TIME,
    "timebudgets": _TIME,
    "sampler": _TUNER,
    "searchalg": _TUNER,
    "algo": _TUNER,
    "pruner": _ASSESSOR,
    "scheduler": _ASSESSOR,
    "direction": _DIRECTION,
    "directions": "objectives=[{'metric': 'loss', 'mode': 'minimize'}] has the direction of each metric",
    "mode": _DIRECTION,
    "optimizemode": _DIRECTION,
    "metric": _METRICS,
    "metrics": _METRICS,
    "randomstate": "use its argument `seed`",
    "pointstoevaluate": "use the field `initial_trials`",
    "resources": "use the field `trial_gpu_number`",
    "resourcespertrial": "use the field `trial_gpu_number`",
    "maxfailures": "use the field `max_trial_retry`",
    "name": "use the field `experiment_name`",
    "studyname": "use the field `experiment_name`",
    "stop": "start an Experiment, and call its stop() when experiment.best_trial.value is good enough",
    "verbosity": "use its argument `verbose`",
    "showprogressbar": "use its argument `verbose`",
    "storage": _FOLDER,
    "storagepath": _FOLDER,
    "localdir": _FOLDER,
}
"""The remedies for other names, in the form of `folded`."""
_FIELDS = {"max_trial_number": "trials", "trial_concurrency": "concurrency", "search_space": "space"}
_IN_CONFIG = re.compile(rf"(?<![\w.'\"])(?:config\.)?({'|'.join(_FIELDS)})\b|(?<![\w.'\"])config\.(?=\w)")
_SEED = re.compile(r"(?:config\.)?(?:(?:tuner|advisor)\.)?class_args(?:\.seed\b|\['seed'\])")


def check_arguments(function: object, maximize: object, fields: Iterable[str], own: Iterable[str]) -> None:
    """Check what the configuration does not. `own`: the keyword arguments of `search`; `fields`: further ones that are given.

    Raises:
        UserError: an argument is unknown, or has another type.
    """
    if not callable(function):
        raise UserError(
            f"cannot search with function={function!r}: it is not callable; pass a function of the parameters"
        )
    if not isinstance(maximize, bool):
        raise UserError(
            f"cannot use maximize={maximize!r}: it is not a bool; write maximize=True or maximize=False"
        )
    for name in fields:
        answer = _ANSWERS.get(folded(name))
        if answer is None and not _is_field(name):
            answer = _remedy(name, own)
        if answer is not None:
            raise UserError(f"cannot use {name} in a search: {answer}")


def _is_field(name: str) -> bool:
    return folded(name) in {*map(folded, ExperimentConfig.field_names()), *ExperimentConfig.aliases}


def _remedy(name: str, own: Iterable[str]) -> str:
    if name in LocalConfig.field_names():
        return f"it is a field of the training service; write training_service=LocalConfig({name}=...)"
    names = {folded(each): each for each in (*ExperimentConfig.field_names(), *own)}
    found = nearest(folded(name), [*names, *_ANSWERS])
    if found in _ANSWERS:
        return _ANSWERS[found]
    if found is not None:
        return f"did you mean {names[found]}?"
    return "there is no such argument; help(search) and help(ExperimentConfig) describe those that exist"


@contextlib.contextmanager
def in_search_terms(seed: object) -> Iterator[None]:
    """Translate errors of the configuration: its fields become arguments of `search`. `seed`: that of `search`."""

    def translated(text: str) -> str:
        if seed is not None:
            text = _SEED.sub("seed", text)
        return _IN_CONFIG.sub(lambda found: _FIELDS.get(found[1], ""), text)

    try:
        yield
    except ConfigInvalid as error:
        raise ConfigInvalid(
            dataclasses.replace(each, key=translated(each.key), message=translated(each.message))
            for each in error.diagnostics
        ) from None
