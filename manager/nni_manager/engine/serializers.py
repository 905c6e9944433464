"""Converts trials, metrics and the experiment to the JSON of NNI's REST API. Times are in milliseconds since the epoch.

Source: NNI v2.0 and v3.0 manager REST API.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.attempts import RegisteredAttempt
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.leaderboard import TOP_TRIALS
from nni_manager.domain.learning_curve import StoredMark
from nni_manager.domain.message_summary import how_it_ended, message_summary, why_it_ended
from nni_manager.domain.objectives import violated
from nni_manager.domain.provenance import AttemptEnvironment, CodeVersion, code_at
from nni_manager.domain.transports import Transport
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_seed import trial_seed
from nni_manager.domain.usage import PeakUsage
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.trial_messages import cluster_messages, message_of
from nni_manager.engine.trial_sample import even
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.rows import MetricRow, SeenJob, UsageRow
from nni_manager.training_services.base import ManagedGpu
from trial_keeper.wire.messages import Stream, Usage
from trial_keeper.wire.reasons import ExitReason


def ms(at_s: float | None) -> int | None:
    """Milliseconds since the epoch."""
    return None if at_s is None else round(at_s * 1000)


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def usage_view(trial: Trial) -> dict[str, Any] | None:
    """The latest usage of the trial (None: not reported to this manager) and its peak; None: never reported."""
    if trial.run.peak_usage is None:
        return None
    latest = trial.run.latest_usage
    return {
        "peak": _usage_fields(trial.run.peak_usage),
        "latest": None if latest is None or trial.state.is_terminal else _usage_fields(latest),
    }


def usage_samples_view(samples: Iterable[tuple[int, UsageRow]]) -> list[dict[str, Any]]:
    """The usage samples of a trial's tasks; times are in milliseconds since the epoch."""
    return [
        {"attempt": number, "task": sample.usage.key.task, "timestamp": ms(sample.at_s)}
        | _usage_fields(sample.usage)
        for number, sample in samples
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


def parameters_view(trial: Trial) -> dict[str, Any]:
    """The parameters of a trial in NNI's format. Source: NNI v3.0 SDK."""
    return {
        "parameter_id": trial.sequence_id,
        "parameter_source": "customized" if trial.is_customized else "algorithm",
        "parameters": trial.parameters,
        "parameter_index": 0,
    }


# The path never changes. Without the cache, it would take a fifth of the time of a list of ten thousand trials.
@lru_cache(maxsize=16)
def _trials_folder(folder: ExperimentFolder) -> str:
    return str(folder.workspace.trials)


def nni_fields(snapshot: ExperimentSnapshot, trial: Trial) -> dict[str, Any]:
    """The fields of a trial that NNI has, without its results."""
    return without_none(
        {
            "trialJobId": trial.trial_id,
            "status": trial.state.nni_status,
            "sequenceId": trial.sequence_id,
            "startTime": ms(trial.run.started_at_s),
            "endTime": ms(trial.run.ended_at_s),
            "hyperParameters": [json.dumps(parameters_view(trial))],
            "logPath": f"{_trials_folder(snapshot.folder)}/{trial.trial_id}",
        }
    )


def trial_view(snapshot: ExperimentSnapshot, trial: Trial) -> dict[str, Any]:
    """One trial: NNI's fields and additional ones."""
    final = None
    if trial.run.final is not None:
        final = [
            {
                "trialJobId": trial.trial_id,
                "parameterId": str(trial.sequence_id),
                "type": "FINAL",
                "sequence": 0,
                "data": trial.run.final,
            }
        ]
    more = {
        "jobId": trial.job_id,
        "submitTime": ms(trial.created_at_s),
        "finalMetricData": final,
    }
    return (
        {"id": trial.trial_id}
        | nni_fields(snapshot, trial)
        | without_none(more)
        | {
            "state": trial.state.value,
            "stoppingSince": ms(trial.stopping_since_s),
            "parameters": trial.parameters,
            "value": trial.run.value,
            **_outcome_view(snapshot, trial),
            "reason": trial.run.reason and trial.run.reason.value,
            "exitCode": trial.run.exit_code,
            "how": trial.run.reason and how_it_ended(trial.run.reason.value, trial.run.exit_code),
            "why": why_of(trial),
            "message": message_of(snapshot, trial),
            "warning": trial.warning,
            "attempt": trial.run.attempt,
            "retries": trial.retries,
            "preemptions": trial.preemptions,
            "continues": trial.continues,
            "isCustomized": trial.is_customized,
            **trial.remarks.to_json(),
            "seed": trial_seed(
                snapshot.experiment.experiment_id, snapshot.config.tuner.seed, trial.sequence_id
            ),
            "intermediateCount": trial.run.intermediate_count,
            "latestIntermediate": trial.run.intermediate,
            "usage": usage_view(trial),
            "link": snapshot.link_of(trial.job_id) if trial.job_id else None,
            **transport_view(snapshot, trial),
        }
    )


def _outcome_view(snapshot: ExperimentSnapshot, trial: Trial) -> dict[str, Any]:
    """With several objectives, their numbers in the trial's result; and the constraints that the result violates."""
    objectives = snapshot.experiment.leaderboard.objectives
    if objectives.is_plain or trial.result is None:
        return {}
    outcome = objectives.outcome(trial.result) if objectives.has_several else None
    return without_none(
        {
            "values": None if outcome is None else list(outcome.values),
            "violates": violated(objectives, trial.result) or None,
        }
    )


def code_view(version: CodeVersion) -> dict[str, Any]:
    """A version of the training code; `since` in milliseconds since the epoch."""
    return {
        "since": ms(version.since_s),
        "digest": version.digest or None,
        "gitCommit": version.git_commit,
        "isDirty": version.is_dirty,
    }


def whole_trial_view(
    snapshot: ExperimentSnapshot,
    trial: Trial,
    environments: Iterable[AttemptEnvironment],
    marks: Collection[StoredMark],
) -> dict[str, Any]:
    """One trial with what ran, and whether it has saved a checkpoint or continues from one. `marks`: those of its attempts."""
    more = {
        "provenance": provenance_view(snapshot, trial, environments),
        "hasCheckpoint": bool(marks) or trial.continues is not None,
    }
    return trial_view(snapshot, trial) | more


def provenance_view(
    snapshot: ExperimentSnapshot, trial: Trial, environments: Iterable[AttemptEnvironment]
) -> dict[str, Any]:
    """What ran as this trial: the code, and for each attempt of each task the host, Python, and the digest of its packages."""
    code = code_at(snapshot.code, trial.run.started_at_s)
    return {
        "code": code and code_view(code),
        "attempts": [
            {name: value or None for name, value in asdict(each).items()} | {"attempt": each.attempt}
            for each in environments
        ],
    }


# A reused job may run thousands of trials; only the latest are shown.
_TRIALS_OF_JOB = 20


def why_of(trial: Trial) -> str:
    """The reason for the trial's end in one line; empty if it succeeded without a problem."""
    if trial.run.reason is None or trial.run.reason is ExitReason.SUCCEEDED:
        return message_summary("", trial.run.message)
    return why_it_ended(trial.run.reason.value, trial.run.exit_code, trial.run.message)


# The values of `road`, the field for `transport` until 0.7; to be removed in 0.8.
_ROAD = {Transport.GRPC: "stream", Transport.SHARED_STORAGE: "mount", Transport.NONE: "none"}


def transport_view(snapshot: ExperimentSnapshot, trial: Trial) -> dict[str, Any]:
    """The transport of an unfinished trial (`grpc`, `shared_storage`, or `none` yet), and the seconds since last contact."""
    if trial.state.is_terminal:
        return {"transport": None, "road": None, "lastContactAgoS": None}
    return _transport_of_job(snapshot, trial.job_id)


def _transport_of_job(snapshot: ExperimentSnapshot, job_id: str) -> dict[str, Any]:
    seen = snapshot.experiment.transports.last_seen(job_id)
    ago_s = None if seen.at_s is None else round(snapshot.now_s - seen.at_s, 1)
    return {"transport": seen.transport.value, "road": _ROAD[seen.transport], "lastContactAgoS": ago_s}


def jobs_view(snapshot: ExperimentSnapshot, stored: Iterable[SeenJob]) -> list[dict[str, Any]]:
    """Each job with its latest trials, its transport, its connected keepers, and the seconds since last contact."""
    stored, trials = list(stored), snapshot.experiment.trials
    ran: dict[str, list[str]] = {job.job_id: [] for job in stored}
    for trial in trials.values():
        if trial.job_id in ran:
            ran[trial.job_id].append(trial.trial_id)
    return [
        {
            "jobId": job.job_id,
            "trialIds": ran[job.job_id][-_TRIALS_OF_JOB:],
            "trialCount": len(ran[job.job_id]),
            "state": _state_of(snapshot, job),
            "created": ms(job.created_at_s),
            "ended": ms(job.ended_at_s),
            **_transport_of_job(snapshot, job.job_id),
            "keepers": [
                {"task": keeper.task, "version": keeper.version} for keeper in snapshot.keepers_of(job.job_id)
            ],
            "link": snapshot.link_of(job.job_id),
            "hasLog": snapshot.job_log is not None,
        }
        for job in stored
    ]


def gpus_view(snapshot: ExperimentSnapshot, gpus: Iterable[ManagedGpu]) -> list[dict[str, Any]]:
    """Each GPU with the trials that have it, and their latest report of its usage; null: there is none."""
    live, trials_of = snapshot.experiment.jobs.live, snapshot.experiment.scheduler.trials_of
    views = []
    for gpu in gpus:
        trials = [trial for job_id in gpu.job_ids if job_id in live for trial in trials_of(live[job_id])]
        reports = (trial.run.latest_usage for trial in trials)
        usages = (
            each
            for report in reports
            if report is not None
            for each in report.gpus
            if each.index == gpu.index
        )
        usage = next(usages, None)
        views.append(
            {
                "index": gpu.index,
                "jobIds": list(gpu.job_ids),
                "trialIds": [trial.trial_id for trial in trials],
                "hasOtherPrograms": gpu.has_other_programs,
                "utilisationPercent": usage and usage.utilisation_percent,
                "memoryUsedBytes": usage and usage.memory_used_bytes,
            }
        )
    return views


def _state_of(snapshot: ExperimentSnapshot, job: SeenJob) -> str:
    live = snapshot.experiment.jobs.live.get(job.job_id)
    if live is not None:
        return live.state.value
    # Without the manager, the state of a job that had not ended is unknown.
    return "ended" if job.ended_at_s is not None or not snapshot.is_view else "unknown"


def attempts_view(
    attempts: Sequence[tuple[RegisteredAttempt, Mapping[Stream, int]]],
) -> list[dict[str, Any]]:
    """The attempts of a trial with their tasks, and the size of each of their logs in bytes."""
    return [
        {
            "attempt": number,
            "tasks": [
                {
                    "task": each.key.task,
                    "id": each.key.attempt_id,
                    "streams": {stream.value: size for stream, size in sizes.items()},
                }
                for each, sizes in attempts
                if each.number == number
            ],
        }
        for number in sorted({each.number for each, _ in attempts})
    ]


def metric_view(row: MetricRow) -> dict[str, Any]:
    """One metric record. `data` is JSON text inside JSON, as in NNI."""
    return {
        "timestamp": ms(row.stored_at_s),
        "trialJobId": row.trial_id,
        "parameterId": row.parameter_id,
        "type": "FINAL" if row.is_final else "PERIODICAL",
        "sequence": row.sequence,
        "data": json.dumps(row.value),
    }


def status_view(snapshot: ExperimentSnapshot) -> dict[str, Any]:
    """The experiment's state, its error, and the problem that a user has to fix, if any."""
    experiment = snapshot.experiment
    return {"status": experiment.state.value, "errors": errors_view(experiment)} | problem_of(snapshot)


def problem_of(snapshot: ExperimentSnapshot) -> dict[str, str]:
    """The problem that a user has to fix, if any."""
    return {"problem": snapshot.problem} if snapshot.problem else {}


def counts_view(experiment: ExperimentCore) -> dict[str, int]:
    """The number of trials with each of NNI's statuses."""
    counts: dict[str, int] = {state.value: 0 for state in TrialState if state.nni_status == state.value}
    for state, count in experiment.lifecycle.counts.items():
        counts[state.nni_status] += count
    return counts


def statistics_view(experiment: ExperimentCore) -> list[dict[str, Any]]:
    """The counts in NNI's format, without zeros."""
    counts = counts_view(experiment)
    return [{"trialJobStatus": status, "trialJobNumber": count} for status, count in counts.items() if count]


def errors_view(experiment: ExperimentCore) -> list[str]:
    """The error that stopped the experiment, if any."""
    return [experiment.error] if experiment.error else []


MAX_FRONT = 1000
"""The maximum number of trials on the front that a summary names; of more, evenly chosen ones."""


def summary_view(snapshot: ExperimentSnapshot) -> dict[str, Any]:
    """An overview of the experiment in one small response."""
    experiment, leaderboard = snapshot.experiment, snapshot.experiment.leaderboard
    best, without = leaderboard.best, leaderboard.latest_without_result
    objectives, front = leaderboard.objectives, leaderboard.front
    shown = [front[place] for place in even(len(front), MAX_FRONT)]
    top = leaderboard.top
    if objectives.has_several:
        top = [front[place] for place in even(len(front), TOP_TRIALS)]
    limits = experiment.budget.limits
    return {
        "id": experiment.experiment_id,
        "name": snapshot.config.experiment_name,
        "status": experiment.state.value,
        "errors": errors_view(experiment),
        "problem": snapshot.problem,
        "problems": list(snapshot.problems),
        "leftovers": list(snapshot.leftovers),
        "clusterMessages": cluster_messages(snapshot),
        "counts": counts_view(experiment),
        "trialCount": len(experiment.trials),
        "maxTrialNum": limits.max_trials,
        "trialConcurrency": limits.concurrency,
        "elapsedS": snapshot.duration_s,
        "maxExecDurationS": limits.max_duration_s,
        "optimizeMode": objectives.first.mode,
        "objectives": [{"metric": each.metric, "mode": each.mode} for each in objectives.all],
        "constraints": [str(each) for each in objectives.constraints],
        "front": {"count": len(front), "ids": [trial.trial_id for trial in shown]},
        "best": trial_view(snapshot, best) if best is not None else None,
        "top": [trial_view(snapshot, trial) for trial in top],
        "latestFailures": [trial_view(snapshot, trial) for trial in leaderboard.latest_failures],
        "latestWithoutResult": None if without is None else trial_view(snapshot, without),
        "keepers": snapshot.keepers,
        "readOnly": snapshot.is_view,
        **experiment.remarks.to_json(),
        "startTime": ms(snapshot.created_at_s),
        "endTime": ms(snapshot.ended_at_s) if experiment.state.is_terminal else None,
    }


def export_view(experiment: ExperimentCore) -> list[dict[str, Any]]:
    """The parameters and results of the trials whose final result counts; with several objectives, which are on the front."""
    leaderboard = experiment.leaderboard
    front = {trial.trial_id for trial in leaderboard.front} if leaderboard.objectives.has_several else None
    return [
        {"trialJobId": trial.trial_id, "parameter": trial.parameters, "value": trial.result}
        | ({} if front is None else {"onFront": trial.trial_id in front})
        for trial in experiment.trials.values()
        if trial.result is not None
    ]


def imported_view(results: Iterable[PriorResult]) -> list[dict[str, Any]]:
    """Imported results, in the format in which they can be imported again."""
    return [{"parameter": result.parameters, "value": json.loads(result.metric)} for result in results]
