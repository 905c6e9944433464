"""The experiments of this user: which there are, which one is meant, and what is known of each."""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nni_manager.cli.client import ManagerClient, ManagerSilent
from nni_manager.errors import NniManagerError, UserMistake
from nni_manager.store.folders import ExperimentFolder, ExperimentUnknown, ManagerProcess, Registry


@dataclass(frozen=True, slots=True)
class KnownExperiment:
    """One experiment, and the manager that owned it a moment ago; None when none did."""

    folder: ExperimentFolder
    manager: ManagerProcess | None

    @property
    def experiment_id(self) -> str:
        """The experiment's id."""
        return self.folder.experiment_id

    def client(self) -> ManagerClient | None:
        """Calls to its manager; None when none runs."""
        return None if self.manager is None else ManagerClient(self.experiment_id, self.manager)

    def trials(self) -> list[dict[str, Any]]:
        """All trials, from its manager or, when none runs, from what is stored."""
        client = self.client()
        return stored_trials(self.folder) if client is None else client.get("/trial-jobs")

    def profile(self) -> dict[str, Any]:
        """NNI's profile, from its manager or from what is stored."""
        client = self.client()
        return stored_profile(self.folder) if client is None else client.get("/experiment")

    def line(self) -> dict[str, Any]:
        """What a list shows. `managerIsRunning` false with a status like RUNNING: the manager died; resume goes on."""
        known: dict[str, Any] = {"id": self.experiment_id}
        try:
            client = self.client()
            known |= stored_metadata(self.folder) if client is None else client.get("/experiment-metadata")
        except ManagerSilent:
            known |= stored_metadata(self.folder) | {"status": "NOT ANSWERING"}
        except NniManagerError as error:
            # One spoilt database must not hide the other experiments.
            known |= {"status": "UNREADABLE", "problem": str(error)}
        return known | {
            "managerIsRunning": self.manager is not None,
            "pid": self.manager and self.manager.pid,
            "port": self.manager and self.manager.port,
            "logDir": str(self.folder.path),
        }


def known_experiments() -> list[KnownExperiment]:
    """All experiments of this user, by id."""
    return [KnownExperiment(folder, folder.running_process()) for folder in Registry.of_user().all()]


def running_experiments() -> list[KnownExperiment]:
    """Those whose manager runs."""
    return [known for known in known_experiments() if known.manager is not None]


def resolve(given: str | None) -> KnownExperiment:
    """The experiment that a command line means: by its id, by the beginning of it, or as the only one that runs.

    Raises:
        ExperimentUnknown: there is none.
        UserMistake: there are several.
    """
    known = known_experiments()
    if given is None:
        running = [each for each in known if each.manager is not None]
        if not running:
            raise ExperimentUnknown(
                "cannot find a running experiment; name one (`nnictl experiment list --all` shows all), "
                "or start one with `nnictl create --config FILE`"
            )
        if len(running) > 1:
            raise UserMistake(
                f"cannot choose among {len(running)} running experiments; name one of {_listed(running)}"
            )
        return running[0]
    matching = beginning_with(given, known)
    if not matching:
        ids = [each.experiment_id for each in known]
        near = difflib.get_close_matches(given, ids, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ExperimentUnknown(
            f"cannot find experiment {given!r}; {hint}`nnictl experiment list --all` shows those there are"
        )
    if len(matching) > 1:
        raise UserMistake(
            f"cannot tell which experiment {given!r} is; write more of one of {_listed(matching)}"
        )
    return matching[0]


def beginning_with(prefix: str, known: Sequence[KnownExperiment]) -> list[KnownExperiment]:
    """The experiment of this id, or those whose ids begin so."""
    exact = [each for each in known if each.experiment_id == prefix]
    return exact or [each for each in known if prefix and each.experiment_id.startswith(prefix)]


def _listed(known: Sequence[KnownExperiment]) -> str:
    return ", ".join(
        f"{each.experiment_id} (port {each.manager.port})" if each.manager else each.experiment_id
        for each in known
    )


# ---- what is stored, as the manager's HTTP API would say it. SQLite and the rest are imported by those who come here.


def stored_trials(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """All trials of an experiment without a manager."""
    from nni_manager.domain.trial import Trial
    from nni_manager.store.store import StoreReader

    def document(trial: Trial) -> dict[str, Any]:
        parameters = {
            "parameter_id": trial.sequence_id,
            "parameter_source": "algorithm",
            "parameters": trial.parameters,
            "parameter_index": 0,
        }
        final = {
            "trialJobId": trial.trial_id,
            "parameterId": str(trial.sequence_id),
            "type": "FINAL",
            "sequence": 0,
            "data": trial.final,
        }
        optional = {
            "startTime": _ms(trial.started_at_s),
            "endTime": _ms(trial.ended_at_s),
            "finalMetricData": None if trial.final is None else [final],
        }
        return {
            "id": trial.trial_id,
            "trialJobId": trial.trial_id,
            "status": trial.state.nni_status,
            "state": trial.state.value,
            "sequenceId": trial.sequence_id,
            "jobId": trial.job_id,
            "submitTime": _ms(trial.created_at_s),
            **{name: value for name, value in optional.items() if value is not None},
            "hyperParameters": [json.dumps(parameters)],
            "logPath": str(folder.workspace.trial(trial.trial_id).path),
            "parameters": trial.parameters,
            "value": trial.value if trial.value is not None and math.isfinite(trial.value) else None,
            "reason": trial.reason and trial.reason.value,
            "exitCode": trial.exit_code,
            "message": trial.message,
            "attempt": trial.attempt,
            "intermediateCount": counted[trial.trial_id],
            "latestIntermediate": latest.get(trial.trial_id),
        }

    with StoreReader(folder.database) as reader:
        metrics = reader.metrics(is_final=False)
        counted = Counter(row.trial_id for row in metrics)
        latest = {row.trial_id: row.value for row in metrics}
        return [document(trial) for trial in reader.trials()]


def stored_summary(folder: ExperimentFolder) -> dict[str, Any]:
    """The end of an experiment whose manager has gone: status, errors, counts, and its best and failed trials."""
    from nni_manager.config.model import ExperimentConfig
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        stored = reader.experiment()
    config = ExperimentConfig.from_json(stored.config)
    trials = stored_trials(folder)
    top = sorted(
        (trial for trial in trials if trial["status"] == "SUCCEEDED" and trial["value"] is not None),
        key=lambda trial: float(trial["value"]),
        reverse=config.tuner.optimize_mode == "maximize",
    )
    failed = sorted(
        (trial for trial in trials if trial["status"] == "FAILED"),
        key=lambda trial: int(trial.get("endTime", 0)),
        reverse=True,
    )
    return {
        "id": stored.experiment_id,
        "name": config.experiment_name,
        "status": stored.state.value,
        "errors": [stored.error] if stored.error else [],
        "problem": "",
        "counts": Counter(trial["status"] for trial in trials),
        "trialCount": len(trials),
        "maxTrialNum": config.max_trial_number,
        "elapsedS": stored.active_s,
        "maxExecDurationS": config.max_exec_duration_s,
        "best": top[0] if top else None,
        "top": top[:10],
        "latestFailures": failed[:3],
    }


def stored_profile(folder: ExperimentFolder) -> dict[str, Any]:
    """NNI's profile of an experiment without a manager."""
    from nni_manager.config.model import ExperimentConfig
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        stored = reader.experiment()
        trial_count = len(reader.trials())
    config = ExperimentConfig.from_json(stored.config)
    profile = {
        "id": stored.experiment_id,
        "revision": 1,
        "execDuration": int(stored.active_s),
        "logDir": str(folder.path),
        "startTime": _ms(stored.created_at_s),
        "endTime": _ms(stored.ended_at_s),
        "nextSequenceId": trial_count,
        "params": {
            "authorName": config.author_name,
            "experimentName": config.experiment_name,
            "description": config.description,
            "trialConcurrency": config.trial_concurrency,
            "maxExecDuration": config.max_exec_duration_s,
            "maxTrialNum": config.max_trial_number,
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
    }
    return {name: value for name, value in profile.items() if value is not None}


def stored_status(folder: ExperimentFolder) -> dict[str, Any]:
    """The last status of an experiment without a manager, and what stopped it."""
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        stored = reader.experiment()
    return {
        "status": stored.state.value,
        "errors": [stored.error] if stored.error else [],
        "isOver": stored.state.is_over,
    }


def stored_metadata(folder: ExperimentFolder) -> dict[str, Any]:
    """What a list shows of an experiment without a manager."""
    from nni_manager.config.model import ExperimentConfig
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        stored = reader.experiment()
    config = ExperimentConfig.from_json(stored.config)
    return {
        "experimentName": config.experiment_name,
        "platform": config.training_service,
        "status": stored.state.value,
        "startTime": _ms(stored.created_at_s),
    } | ({} if stored.ended_at_s is None else {"endTime": _ms(stored.ended_at_s)})


def _ms(at_s: float | None) -> int | None:
    return None if at_s is None else round(at_s * 1000)
