"""Converts what describes an experiment to JSON: its profile, its entry in lists, and its configuration.

The keys of a profile's params are those of the experiment file: NNI's first schema, or its second. Source: the REST API of NNI's
manager, v1.9 for the first schema, v2.10 and v3.0 for the second.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from nni_manager.config.model import AssessorConfig, ExperimentSpec, TunerConfig, UserClass
from nni_manager.config.platforms import of_stored
from nni_manager.config.pruned_trials import lesson_of_early_stops
from nni_manager.config.schema import Key, keys_in
from nni_manager.config.shared_keys import SharedKeys
from nni_manager.domain.trial import TrialState
from nni_manager.engine.serializers import code_view, ms, problem_of, transport_view, without_none
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from trial_keeper import __version__

# The names of a tuner's arguments and of parameters are left unchanged.
_WITH_NAMES_OF_USERS = ("class_args", "initial_trials", "parameters")


def profile_view(snapshot: ExperimentSnapshot) -> dict[str, Any]:
    """The experiment's profile."""
    experiment = snapshot.experiment
    trials = experiment.scheduler.trials_with_jobs
    transports = {trial.trial_id: transport_view(snapshot, trial) for trial in trials}
    params_of = _params_of_v1 if snapshot.config.file_schema == "v1" else _params_of_v2
    return without_none(
        {
            "id": experiment.experiment_id,
            "revision": 1,
            "execDuration": int(snapshot.duration_s),
            "logDir": str(snapshot.folder.path),
            "startTime": ms(snapshot.created_at_s),
            "endTime": ms(snapshot.ended_at_s) if experiment.state.is_terminal else None,
            "nextSequenceId": 1 + max((each.sequence_id for each in experiment.trials.values()), default=-1),
            "code": [code_view(each) for each in snapshot.code],
            "params": params_of(snapshot.config),
            "trialTransports": transports,
            "trialRoads": transports,  # the name of `trialTransports` until 0.7; will be removed in 0.8
        }
    ) | problem_of(snapshot)


def _params_of_v1(config: ExperimentSpec) -> dict[str, Any]:
    return _shared_keys(config, lambda key: key.v1[0][-1]) | {
        "searchSpace": config.search_space_raw,
        "trainingServicePlatform": config.training_service,
        "tuner": {"builtinTunerName": config.tuner.name, "classArgs": config.tuner.class_args},
        "trial": {
            "command": config.trial_command,
            "codeDir": str(config.code_dir),
            "gpuNum": config.trial_gpu_number,
        },
    }


def _params_of_v2(config: ExperimentSpec) -> dict[str, Any]:
    of_trials = {
        "trialCommand": config.trial_command,
        "trialCodeDirectory": str(config.code_dir),
        "trialGpuNumber": config.trial_gpu_number,
    }
    return without_none(
        _shared_keys(config, lambda key: None if key.declared.only_v1 else key.path[-1])
        | {
            "experimentType": "hpo",
            "searchSpace": config.search_space_raw,
            **of_trials,
            "useAnnotation": config.is_annotated,
            "experimentWorkingDirectory": str(config.log_dir),
            "tuner": _algorithm_of_v2(config.tuner),
            "assessor": None if config.assessor is None else _algorithm_of_v2(config.assessor),
            "trainingService": without_none(
                {
                    "platform": of_stored(config.training_service).name,
                    **of_trials,
                    "reuseMode": config.reuse_mode,
                }
                | config.cluster.keys_of_profile()
            ),
        }
    )


def _shared_keys(config: ExperimentSpec, name_of: Callable[[Key], str | None]) -> dict[str, Any]:
    """The keys of all platforms with their values, by the names of one schema. Durations are in seconds."""
    public = config.without_secrets()
    document = public.model_dump(by_alias=True, exclude_none=True, include={*SharedKeys.model_fields})
    document["failFast"] = config.fail_fast or False
    names = {key.path[-1]: name_of(key) for key in keys_in(SharedKeys) if len(key.path) == 1}
    return {
        name: document.get(key) for key, name in names.items() if name is not None and document.get(key) != []
    }


def _algorithm_of_v2(algorithm: TunerConfig | AssessorConfig) -> dict[str, Any]:
    own: UserClass | None = algorithm.own
    if own is None:
        return {"name": algorithm.name, "classArgs": algorithm.class_args}
    return without_none(
        {"className": own.class_name, "codeDirectory": own.code_dir, "classArgs": algorithm.class_args}
    )


def stored_metadata_view(folder: ExperimentFolder) -> dict[str, Any]:
    """The fields of a stored experiment in a list of experiments.

    Raises:
        StoreUnusable: its database cannot be read.
    """
    snapshot = ExperimentSnapshot.stored(folder, has_trials=False)
    objectives = snapshot.config.all_objectives
    with StoreReader(folder.database) as reader:
        totals = reader.trial_totals()
        if not objectives.has_several and not objectives.constraints:
            best = totals.highest if objectives.first.mode == "maximize" else totals.lowest
            return _metadata_view(snapshot, totals.counts, best, None)
        # A range of values does not show which results are the best; their numbers do, without the rest of the trials.
        ranked = objectives.ranked((final, final) for _, final in reader.finals())
    best = objectives.value_of(ranked[0]) if ranked and not objectives.has_several else None
    return _metadata_view(snapshot, totals.counts, best, len(ranked) if objectives.has_several else None)


def metadata_view(snapshot: ExperimentSnapshot) -> dict[str, Any]:
    """The fields of the experiment, of which the snapshot has all trials, in a list of experiments."""
    lifecycle, leaderboard = snapshot.experiment.lifecycle, snapshot.experiment.leaderboard
    best = None if leaderboard.best is None else leaderboard.best.run.value
    front_count = len(leaderboard.front) if leaderboard.objectives.has_several else None
    return _metadata_view(snapshot, lifecycle.counts, best, front_count)


def _metadata_view(
    snapshot: ExperimentSnapshot,
    counts: Mapping[TrialState, int],
    best: float | None,
    front_count: int | None,
) -> dict[str, Any]:
    return without_none(
        {
            "id": snapshot.experiment.experiment_id,
            "experimentName": snapshot.config.experiment_name,
            "platform": snapshot.config.training_service,
            "status": snapshot.experiment.state.value,
            "startTime": ms(snapshot.created_at_s),
            "endTime": ms(snapshot.ended_at_s) if snapshot.experiment.state.is_terminal else None,
            "logDir": str(snapshot.folder.path),
            "trialCount": sum(counts.values()),
            "succeededCount": counts.get(TrialState.SUCCEEDED, 0),
            "failedCount": counts.get(TrialState.FAILED, 0),
            "bestValue": best,
            "frontCount": front_count,
            "durationS": snapshot.duration_s,
            **snapshot.experiment.remarks.to_json(),
        }
    ) | problem_of(snapshot)


def configuration_view(snapshot: ExperimentSnapshot) -> dict[str, Any]:
    """What users see of the current configuration, without credentials: `text` is the stored one as YAML.

    Its keys do not depend on the schema of the experiment file.
    """
    import yaml  # imported here because nnictl shows trials without it

    config, limits = snapshot.config, snapshot.experiment.budget.limits
    fields = json.loads(config.without_secrets().to_json())
    for name in ("schema", "search_space_raw", "search_space_revision", "expansions", "warnings"):
        del fields[name]
    return {
        "id": snapshot.experiment.experiment_id,
        "logDir": str(snapshot.folder.path),
        "description": config.description,
        "tuner": {"name": config.tuner.name, "classArgs": config.tuner.class_args},
        "assessor": None if config.assessor is None else {"name": config.assessor.name},
        "earlyStops": lesson_of_early_stops(config),
        "warmStart": [{"source": each.source, "value": each.value} for each in config.warm_start],
        "trainingService": config.training_service,
        "trial": {
            "command": config.trial_command,
            "codeDirectory": str(config.code_dir),
            "codeVersion": code_view(snapshot.code[-1]) if snapshot.code else None,
            "gpuNumber": config.trial_gpu_number,
            "maxDurationS": limits.max_trial_duration_s,
        },
        "searchSpace": config.search_space_raw,
        "version": __version__,
        "text": yaml.safe_dump(_as_written(fields), sort_keys=False, allow_unicode=True, width=1000),
    }


def _as_written(value: Any) -> Any:
    """The value with key names as in configuration files, without unset fields."""
    if isinstance(value, dict):
        fields = {
            _in_camel_case(name): each if name in _WITH_NAMES_OF_USERS else _as_written(each)
            for name, each in value.items()
            if each is not None
        }
        return {name: each for name, each in fields.items() if each not in ({}, [])}
    return [_as_written(each) for each in value] if isinstance(value, list) else value


def _in_camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))
