"""Trials, metrics and the experiment as NNI's REST interface shows them. Times in milliseconds since the epoch.

Source: NNI v2.0 and v3.0 manager REST API.
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from nni_manager.config.known_results import KnownResult
from nni_manager.config.model import ExperimentConfig, without_secrets
from nni_manager.domain.experiment import Experiment
from nni_manager.domain.metrics import LONGEST_SHOWN_CHARACTERS, reward
from nni_manager.domain.telling import telling_line
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.usage import PeakUsage
from nni_manager.engine.picture import Picture
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.store import MetricRow, SeenJob, UsageRow
from trial_keeper.wire.messages import AttemptKey, Stream, Usage


def _ms(at_s: float | None) -> int | None:
    return None if at_s is None else round(at_s * 1000)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def usage_view(trial: Trial) -> dict[str, Any] | None:
    """What the trial uses now (None when no keeper of this manager's time has told) and the most it used; None: never told."""
    if trial.peak_usage is None:
        return None
    latest = trial.latest_usage
    return {
        "peak": _usage_fields(trial.peak_usage),
        "latest": None if latest is None or trial.state.is_final else _usage_fields(latest),
    }


def usage_samples_view(samples: Iterable[UsageRow]) -> list[dict[str, Any]]:
    """What the tasks of a trial used, sample by sample; times in milliseconds since the epoch."""
    return [
        {"attempt": sample.usage.key.attempt, "task": sample.usage.key.task, "timestamp": _ms(sample.at_s)}
        | _usage_fields(sample.usage)
        for sample in samples
    ]


def _usage_fields(usage: PeakUsage | Usage) -> dict[str, Any]:
    return {
        "cpuPercent": usage.cpu_percent,
        "rssBytes": usage.rss_bytes,
        "diskBytes": usage.disk_bytes,
        "gpus": [
            {
                "index": gpu.index,
                "utilisationPercent": gpu.utilisation_percent,
                "memoryUsedBytes": gpu.memory_used_bytes,
            }
            for gpu in usage.gpus
        ],
    }


# Where it is does not change; to look it up for each of ten thousand trials would take a fifth of the list's time.
@lru_cache(maxsize=16)
def _trials_folder(folder: ExperimentFolder) -> str:
    return str(folder.workspace.trials)


def trial_view(picture: Picture, trial: Trial) -> dict[str, Any]:
    """One trial: NNI's fields, and those that NNI never had."""
    parameters = {
        "parameter_id": trial.sequence_id,
        "parameter_source": "customized" if trial.is_customized else "algorithm",
        "parameters": trial.parameters,
        "parameter_index": 0,
    }
    final = None
    if trial.final is not None:
        final = [
            {
                "trialJobId": trial.trial_id,
                "parameterId": str(trial.sequence_id),
                "type": "FINAL",
                "sequence": 0,
                "data": trial.final,
            }
        ]
    return _without_none(
        {
            "id": trial.trial_id,
            "trialJobId": trial.trial_id,
            "status": trial.state.nni_status,
            "sequenceId": trial.sequence_id,
            "jobId": trial.job_id,
            "submitTime": _ms(trial.created_at_s),
            "startTime": _ms(trial.started_at_s),
            "endTime": _ms(trial.ended_at_s),
            "hyperParameters": [json.dumps(parameters)],
            "logPath": f"{_trials_folder(picture.folder)}/{trial.trial_id}",
            "finalMetricData": final,
        }
    ) | {
        "state": trial.state.value,
        "parameters": trial.parameters,
        "value": trial.value,
        "reason": trial.reason and trial.reason.value,
        "exitCode": trial.exit_code,
        "message": _message(picture, trial),
        "warning": trial.warning,
        "attempt": trial.attempt,
        "retries": trial.retries,
        "isCustomized": trial.is_customized,
        "intermediateCount": trial.intermediate_count,
        "latestIntermediate": trial.intermediate,
        "usage": usage_view(trial),
        "link": picture.link_of(trial.job_id) if trial.job_id else None,
        **road_view(picture, trial),
    }


# Of what a trial says, a row of ten thousand shows a line.
_LONGEST_CELL = 256
_LONGEST_MESSAGE = 300
# A metric with more names than this is no table.
_MOST_KEYS = 50
# A reused job may run thousands.
_TRIALS_OF_JOB = 20


def row_view(trial: Trial) -> dict[str, Any]:
    """What a table of all trials shows of one: small, and nothing that changes by itself."""
    parameters = {name: _cell(value) for name, value in trial.parameters.items()}
    reason = trial.reason and trial.reason.value
    row = {
        "id": trial.trial_id,
        "seq": trial.sequence_id,
        "state": trial.state.value,
        "status": trial.state.nni_status,
        "parameters": parameters,
        "value": trial.value,
        "latest": None if trial.intermediate is None else reward(trial.intermediate),
        "count": trial.intermediate_count,
        "submit": _ms(trial.created_at_s),
        "start": _ms(trial.started_at_s),
        "end": _ms(trial.ended_at_s),
        "reason": reason,
        "exitCode": trial.exit_code,
        "message": telling_line(reason or "", trial.message)[:_LONGEST_MESSAGE],
        "attempt": trial.attempt,
        "customized": trial.is_customized,
    }
    if keys := _names_in(trial.final or trial.intermediate):
        row["keys"] = keys
    return row if parameters == trial.parameters else row | {"cut": True}


def _cell(value: Any) -> Any:
    if isinstance(value, (int, float)) or value is None:
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]}…"


def _names_in(metric: str | None) -> list[str]:
    """Those of a metric that has more than one number; `metric` is JSON text."""
    if metric is None or not metric.startswith("{") or len(metric) > LONGEST_SHOWN_CHARACTERS:
        return []
    try:
        return list(json.loads(metric))[:_MOST_KEYS]
    except (ValueError, RecursionError):
        return []


def _message(picture: Picture, trial: Trial) -> str:
    """How it ended, or what keeps it from beginning."""
    if trial.state is not TrialState.WAITING or not trial.job_id:
        return trial.message
    why = picture.why_it_waits(trial.job_id)
    return f"not started yet: {why}" if why else trial.message


def road_view(picture: Picture, trial: Trial) -> dict[str, Any]:
    """By which road a trial that is not over is heard (`stream`, `mount`, or `none` yet), and how long ago it last was."""
    if trial.state.is_final:
        return {"road": None, "lastContactAgoS": None}
    return _road_of_job(picture, trial.job_id)


def _road_of_job(picture: Picture, job_id: str) -> dict[str, Any]:
    contact = picture.roads.contact(job_id)
    ago_s = None if contact.at_s is None else round(picture.now_s - contact.at_s, 1)
    return {"road": contact.road.value, "lastContactAgoS": ago_s}


def jobs_view(picture: Picture, stored: Iterable[SeenJob]) -> list[dict[str, Any]]:
    """Jobs with the trials that each is to run, runs, or ran last; and who is heard of it, by which road, how long ago."""
    stored, trials = list(stored), picture.experiment.trials
    ran: dict[str, list[str]] = {job.job_id: [] for job in stored}
    for trial in trials.values():
        if trial.job_id in ran:
            ran[trial.job_id].append(trial.trial_id)
    return [
        {
            "jobId": job.job_id,
            "trialIds": ran[job.job_id][-_TRIALS_OF_JOB:],
            "trialCount": len(ran[job.job_id]),
            "state": _state_of(picture, job),
            "created": _ms(job.created_at_s),
            "ended": _ms(job.ended_at_s),
            **_road_of_job(picture, job.job_id),
            "keepers": [
                {"task": keeper.task, "version": keeper.version} for keeper in picture.keepers_of(job.job_id)
            ],
            "link": picture.link_of(job.job_id),
        }
        for job in stored
    ]


def _state_of(picture: Picture, job: SeenJob) -> str:
    live = picture.experiment.jobs.live.get(job.job_id)
    if live is not None:
        return live.state.value
    # Without its manager nobody can tell of one that had not ended.
    return "ended" if job.ended_at_s is not None or not picture.is_view else "unknown"


def attempts_view(sizes: Mapping[AttemptKey, Mapping[Stream, int]]) -> list[dict[str, Any]]:
    """The attempts of a trial with their tasks, and how many bytes there are of each of their logs."""
    return [
        {
            "attempt": attempt,
            "tasks": [
                {
                    "task": key.task,
                    "streams": {stream.value: size for stream, size in sizes[key].items()},
                }
                for key in sizes
                if key.attempt == attempt
            ],
        }
        for attempt in sorted({key.attempt for key in sizes})
    ]


def configuration_view(config: ExperimentConfig) -> dict[str, Any]:
    """The experiment as it is stored, as YAML for people and without logins; and the search space as it is now."""
    import yaml  # nnictl shows trials without it

    fields = json.loads(without_secrets(config).to_json())
    for name in ("search_space_raw", "search_space_revision", "expansions", "warnings"):
        del fields[name]
    text = yaml.safe_dump(_as_written(fields), sort_keys=False, allow_unicode=True, width=1000)
    return {"text": text, "searchSpace": config.search_space_raw}


def _as_written(value: Any) -> Any:
    """With names as files have them, and without what was not said."""
    if isinstance(value, dict):
        # The arguments of a tuner have the names that it gave them.
        said = {
            _in_camel_case(name): each if name == "class_args" else _as_written(each)
            for name, each in value.items()
            if each is not None
        }
        return {name: each for name, each in said.items() if each not in ({}, [])}
    return [_as_written(each) for each in value] if isinstance(value, list) else value


def _in_camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def metric_view(row: MetricRow) -> dict[str, Any]:
    """One record. `data` is JSON text inside JSON, as NNI has it."""
    return {
        "timestamp": _ms(row.stored_at_s),
        "trialJobId": row.trial_id,
        "parameterId": row.parameter_id,
        "type": "FINAL" if row.is_final else "PERIODICAL",
        "sequence": row.sequence,
        "data": json.dumps(row.value),
    }


def status_view(picture: Picture) -> dict[str, Any]:
    """The experiment's state, what stopped it, and what it needs a person for, if for anything."""
    experiment = picture.experiment
    return {"status": experiment.state.value, "errors": errors_view(experiment)} | _problem(picture)


def _problem(picture: Picture) -> dict[str, str]:
    return {"problem": picture.problem} if picture.problem else {}


def counts_view(experiment: Experiment) -> dict[str, int]:
    """How many trials have each of NNI's statuses."""
    counts: dict[str, int] = {state.value: 0 for state in TrialState if state.nni_status == state.value}
    for state, count in experiment.counts.items():
        counts[state.nni_status] += count
    return counts


def statistics_view(experiment: Experiment) -> list[dict[str, Any]]:
    """The same as NNI has it, without the statuses that no trial has."""
    counts = counts_view(experiment)
    return [{"trialJobStatus": status, "trialJobNumber": count} for status, count in counts.items() if count]


def errors_view(experiment: Experiment) -> list[str]:
    """What stopped the experiment, if anything did."""
    return [experiment.error] if experiment.error else []


def profile_view(picture: Picture) -> dict[str, Any]:
    """The experiment's profile."""
    config, experiment = picture.config, picture.experiment
    return _without_none(
        {
            "id": experiment.experiment_id,
            "revision": 1,
            "execDuration": int(picture.duration_s),
            "logDir": str(picture.folder.path),
            "startTime": _ms(picture.created_at_s),
            "endTime": _ms(picture.ended_at_s) if experiment.state.is_over else None,
            "nextSequenceId": len(experiment.trials),
            "params": {
                "authorName": config.author_name,
                "experimentName": config.experiment_name,
                "description": config.description,
                "trialConcurrency": experiment.limits.concurrency,
                "maxExecDuration": experiment.limits.max_duration_s,
                "maxTrialNum": experiment.limits.max_trials,
                "maxTrialDuration": experiment.limits.max_trial_duration_s,
                "maxTrialRetry": experiment.limits.max_retries,
                "searchSpace": config.search_space_raw,
                "trainingServicePlatform": config.training_service,
                "versionCheck": config.version_check,
                "logCollection": config.log_collection,
                "tuner": {"builtinTunerName": config.tuner.name, "classArgs": config.tuner.class_args},
                "trial": {
                    "command": config.trial_command,
                    "codeDir": str(config.code_dir),
                    "gpuNum": config.gpu_num,
                },
            },
            "trialRoads": {
                trial.trial_id: road_view(picture, trial) for trial in experiment.trials_with_jobs
            },
        }
    ) | _problem(picture)


def metadata_view(picture: Picture) -> dict[str, Any]:
    """What a list of experiments shows."""
    return _without_none(
        {
            "id": picture.experiment.experiment_id,
            "experimentName": picture.config.experiment_name,
            "platform": picture.config.training_service,
            "status": picture.experiment.state.value,
            "startTime": _ms(picture.created_at_s),
            "endTime": _ms(picture.ended_at_s) if picture.experiment.state.is_over else None,
            "logDir": str(picture.folder.path),
        }
    ) | _problem(picture)


def summary_view(picture: Picture) -> dict[str, Any]:
    """Everything a person wants to see at a glance, in one small answer."""
    experiment, without = picture.experiment, picture.experiment.latest_without_result
    return {
        "id": experiment.experiment_id,
        "name": picture.config.experiment_name,
        "status": experiment.state.value,
        "errors": errors_view(experiment),
        "problem": picture.problem,
        "counts": counts_view(experiment),
        "trialCount": len(experiment.trials),
        "maxTrialNum": experiment.limits.max_trials,
        "trialConcurrency": experiment.limits.concurrency,
        "elapsedS": picture.duration_s,
        "maxExecDurationS": experiment.limits.max_duration_s,
        "optimizeMode": picture.config.tuner.optimize_mode,
        "best": trial_view(picture, experiment.best) if experiment.best is not None else None,
        "top": [trial_view(picture, trial) for trial in experiment.top],
        "latestFailures": [trial_view(picture, trial) for trial in experiment.latest_failures],
        "latestWithoutResult": None if without is None else trial_view(picture, without),
        "keepers": picture.keepers,
        "readOnly": picture.is_view,
        "startTime": _ms(picture.created_at_s),
        "endTime": _ms(picture.ended_at_s) if experiment.state.is_over else None,
    }


def export_view(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Parameters and results of the trials that succeeded."""
    return [
        {"trialJobId": trial.trial_id, "parameter": trial.parameters, "value": trial.final}
        for trial in trials
        if trial.state is TrialState.SUCCEEDED and trial.final is not None
    ]


def imported_view(results: Iterable[KnownResult]) -> list[dict[str, Any]]:
    """Results from elsewhere, as they can be imported again."""
    return [{"parameter": result.parameters, "value": json.loads(result.metric)} for result in results]
