"""Queries and changes of one experiment, over HTTP to its manager; after the manager's exit, queries read the store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from nni_manager.client.added_trial import add_trial
from nni_manager.client.experiments import KnownExperiment, known_experiment, known_experiments, resolve
from nni_manager.client.imported import import_results
from nni_manager.client.manager_client import ManagerUnresponsive
from nni_manager.client.results import all_trials, finite, parsed
from nni_manager.domain.metrics import numbers_in
from nni_manager.errors import UserError
from nni_manager.experiment.aliases import plain
from nni_manager.experiment.data import (
    TrialJob,
    TrialMetricData,
    TrialResult,
    curves_of,
    frame_of,
    frame_with,
)
from nni_manager.experiment.python_terms import in_python_terms
from nni_manager.store.folders import ExperimentFolder

if TYPE_CHECKING:
    import pandas

    from nni_manager.domain.remarks import Remarks

_Answer = TypeVar("_Answer")


class NotStarted(UserError):
    """cannot query an experiment that has not been started; call start() or run() first"""


class StartedExperiment:
    """The methods of `Experiment` that need the id of a started experiment, and no configuration."""

    def __init__(self, experiment_id: str | None) -> None:
        self.id = experiment_id
        self._folder: ExperimentFolder | None = None

    def get_status(self) -> str:
        """INITIALIZED, RUNNING, NO_MORE_TRIAL, TUNER_NO_MORE_TRIAL, DONE, ERROR, STOPPING or STOPPED."""
        return str(self._get("/check-status")["status"])

    def get_trial_job(self, trial_job_id: str) -> TrialJob:
        """One trial.

        Raises:
            UserError: no trial has this id.
        """
        return TrialJob.of(self._query(lambda known: known.trial(trial_job_id)))

    def get_provenance(self, trial_job_id: str) -> dict[str, Any]:
        """What ran as a trial.

        `code`: `digest`, `gitCommit`, `isDirty` and `since`, or None. `attempts`: `attempt`, `task`, `host`, `node`, `python` and
        the digest `packages` of each. `packages`: the newest list, as NAME==VERSION; empty if it is not recorded.

        Raises:
            UserError: no trial has this id.
        """

        def read(known: KnownExperiment) -> dict[str, Any]:
            found: dict[str, Any] = known.trial(trial_job_id)["provenance"]
            is_recorded = any(each["packages"] for each in found["attempts"])
            return found | {"packages": known.packages(trial_job_id) if is_recorded else []}

        return self._query(read)

    def list_trial_jobs(self) -> list[TrialJob]:
        """All trials, in order of creation."""
        return [TrialJob.of(each) for each in self._get("/trials")]

    @property
    def best_trial(self) -> TrialJob | None:
        """The trial with the best result so far; None without a result, or with several objectives: see `best_trials`."""
        best = self._get("/summary")["best"]
        return None if best is None else TrialJob.of(best)

    @property
    def best_trials(self) -> list[TrialJob]:
        """With several objectives the trials on the Pareto front, in the order of the first one; else `best_trial`, if any."""
        summary = self._get("/summary")
        if len(summary.get("objectives", ())) < 2:
            return [] if summary["best"] is None else [TrialJob.of(summary["best"])]
        is_maximized = summary["objectives"][0]["mode"] == "maximize"
        front = {each["trialJobId"] for each in self._get("/export-data") if each["onFront"]}
        found = [each for each in self._get("/trials") if each["id"] in front]
        found.sort(key=lambda each: -each["value"] if is_maximized else each["value"])
        return [TrialJob.of(each) for each in found]

    def get_job_statistics(self) -> list[dict[str, Any]]:
        """The number of trials in each status: `trialJobStatus` and `trialJobNumber`."""
        return list(self._get("/job-statistics"))

    def get_job_metrics(self, trial_job_id: str | None = None) -> dict[str, list[TrialMetricData]]:
        """All reported metrics, by trial, in order of arrival; those of one trial if its id is given.

        Raises:
            UserError: no trial has this id.
        """
        if trial_job_id is not None:
            self.get_trial_job(trial_job_id)
        found: dict[str, list[TrialMetricData]] = {}
        for each in self._get("/metric-data", *filter(None, [trial_job_id])):
            found.setdefault(each["trialJobId"], []).append(TrialMetricData.of(each))
        return found

    def get_experiment_profile(self) -> dict[str, Any]:
        """The limits, search space, tuner and trial of the experiment, with the keys of NNI's REST API."""
        return dict(self._get("/experiment"))

    def get_experiment_metadata(self, exp_id: str) -> dict[str, Any]:
        """The list entry of one experiment of this user; empty if none has this id."""
        lines = self.get_all_experiments_metadata()
        return next((line for line in lines if line["id"] == exp_id), {})

    def get_all_experiments_metadata(self) -> list[dict[str, Any]]:
        """The list entries of all experiments of this user."""
        return [known.line() for known in known_experiments()]

    @overload
    def export_data(self, as_frame: Literal[False] = False) -> list[TrialResult]: ...

    @overload
    def export_data(self, as_frame: Literal[True]) -> pandas.DataFrame: ...

    @overload
    def export_data(self, as_frame: bool) -> list[TrialResult] | pandas.DataFrame: ...

    def export_data(self, as_frame: bool = False) -> list[TrialResult] | pandas.DataFrame:
        """Parameters and final results of the trials, as records or as a pandas data frame.

        Raises:
            PandasMissing: a frame is requested, and pandas is not installed.
        """
        results = [TrialResult.of(each) for each in self._get("/export-data")]
        return frame_of(results, self._metrics()) if as_frame else results

    @property
    def objectives(self) -> list[dict[str, str]]:
        """What the experiment searches for: `metric` and `mode` of each objective."""
        # A manager of an earlier version has no objectives.
        return list(self._get("/summary").get("objectives") or [{"metric": "default", "mode": "maximize"}])

    def _metrics(self) -> list[str]:
        return [each["metric"] for each in self.objectives]

    def trials_dataframe(self) -> pandas.DataFrame:
        """All trials, also failed and running ones, as a pandas data frame.

        Its columns: `number`, `trialJobId`, one for each parameter, `value`, `state`, `durationS`, `tags` (a list) and `note`; if
        results are dicts, also `value/NAME` for each entry. `value` is the number of the first objective; NaN if the trial has no
        such number. With several objectives, `onFront`: whether the trial is on the Pareto front. With constraints, `violates`:
        the list of those that its result violates.

        Raises:
            PandasMissing: pandas is not installed.
        """
        trials, exported, summary = self._get("/trials"), self._get("/export-data"), self._get("/summary")
        results = {each["trialJobId"]: parsed(each["value"]) for each in exported}
        further: dict[str, dict[str, Any]] = {}
        if len(summary.get("objectives", ())) > 1:
            front = {each["trialJobId"] for each in exported if each["onFront"]}
            further["onFront"] = {each["id"]: each["id"] in front for each in trials}
        if summary.get("constraints"):
            further["violates"] = {each["id"]: each.get("violates", []) for each in trials}
        frame = frame_with(*all_trials(trials, results, self._metrics(), further))
        # In place of results such as a list or -inf, which a tuner ignores, and of None, which would make no column of numbers.
        frame["value"] = [math.nan if each["value"] is None else float(each["value"]) for each in trials]
        return frame

    def metrics_dataframe(self, trial_job_id: str | None = None) -> pandas.DataFrame:
        """The learning curves: a row for each report, those of one trial if its id is given; of final results only the first.

        Its columns: `trialJobId`, `step` (counts a trial's rows from 0), `type` (PERIODICAL or FINAL), `timestamp` in
        milliseconds, `value`, and `value/NAME` for each entry of a report that is a dict. `value` is the number of the first
        objective; NaN if the report has no such number.

        Raises:
            PandasMissing: pandas is not installed.
            UserError: no trial has this id.
        """
        reports = self.get_job_metrics(trial_job_id)
        return curves_of([each for of_trial in reports.values() for each in of_trial], self._metrics()[0])

    def importances(self, metric: str | None = None) -> dict[str, float]:
        """The share of each parameter in whether a trial is among the best tenth, highest first: those of the page.

        `metric`: that of an objective, or another number in the results, which counts as one of the first objective; None: the
        metric of the first objective. The name of a nested parameter is its path, as in "layer/size". With few trials the
        shares depend on chance: the best tenth of 20 trials are two. Source: PED-ANOVA, see `nni_manager.engine.importance`.

        Raises:
            UserError: fewer than 10 trials have such a number, or all have the same parameters or results.
        """
        # The import takes a second.
        from nni_manager.engine.importance import importance_of

        modes = {each["metric"]: each["mode"] for each in self.objectives}
        first = next(iter(modes))
        metric = metric or first
        results = [(each["parameter"], each["value"]) for each in self._get("/export-data")]
        found = importance_of(results, metric, maximize=modes.get(metric, modes[first]) == "maximize")
        if not found.shares:
            known = {name for _, text in results for name in numbers_in(text, 100, (), without_default=False)}
            remedy = (
                f"name one of {', '.join(sorted(known))}" if known and not found.trials else "run more trials"
            )
            raise UserError(f"cannot evaluate the importance of parameters: {found.why}; {remedy}")
        return dict(found.shares)

    # ---- tags and notes, also of an experiment that does not run

    @property
    def tags(self) -> list[str]:
        """The experiment's tags, in alphabetical order. `tag` changes them."""
        return list(self._remarks().tags)

    @property
    def note(self) -> str:
        """The experiment's note; empty: none. `set_note` changes it."""
        return self._remarks().note

    def tag(self, *add: str, remove: Iterable[str] = ()) -> list[str]:
        """Add tags to the experiment and remove others; returns its tags then.

        A tag has up to 64 letters, digits and `-_.:/`. Adding a tag that is there, and removing one that is not, has no effect.

        Raises:
            UserError: a tag has another form, or there would be more than 20.
        """
        return list(self._change_remarks(None, add=add, remove=remove).tags)

    def set_note(self, note: str) -> None:
        """Set the experiment's note, up to 10,000 characters; an empty text removes it.

        Raises:
            UserError: this is no text, or it is too long.
        """
        self._change_remarks(None, note=_note(note))

    def tag_trial(self, trial_job_id: str, *add: str, remove: Iterable[str] = ()) -> list[str]:
        """Add tags to a trial and remove others, as `tag`; returns its tags then.

        Raises:
            UserError: no trial has this id, a tag has another form, or there would be more than 20.
        """
        self.get_trial_job(trial_job_id)
        return list(self._change_remarks(trial_job_id, add=add, remove=remove).tags)

    def set_trial_note(self, trial_job_id: str, note: str) -> None:
        """Set the note of a trial, as `set_note`.

        Raises:
            UserError: no trial has this id, or the note is no text, or too long.
        """
        self.get_trial_job(trial_job_id)
        self._change_remarks(trial_job_id, note=_note(note))

    # ---- changes of a running experiment

    def update_trial_concurrency(self, value: int) -> None:
        """Set the number of concurrent trials.

        Raises:
            UserError: the experiment does not run, or the value is invalid.
        """
        self._update("TRIAL_CONCURRENCY", "trialConcurrency", value)

    def update_max_experiment_duration(self, value: str | int) -> None:
        """Set the time, such as "90m", after which no new trials are proposed, counted from the experiment's start.

        Raises:
            UserError: the experiment does not run, or the value is invalid.
        """
        self._update("MAX_EXEC_DURATION", "maxExperimentDuration", value)

    def update_max_trial_number(self, value: int) -> None:
        """Set the maximum number of trials. A higher limit continues an experiment that is DONE because of it.

        Raises:
            UserError: the experiment does not run, or the value is invalid.
        """
        self._update("MAX_TRIAL_NUM", "maxTrialNumber", value)

    def update_max_trial_duration(self, value: str | int) -> None:
        """Set the maximum duration of a trial, such as "30m". Trials that run longer are stopped.

        Raises:
            UserError: the experiment does not run, or the value is invalid.
        """
        self._update("MAX_TRIAL_DURATION", "maxTrialDuration", value)

    def update_search_space(self, value: Mapping[str, Any]) -> None:
        """Set the search space of new trials.

        Raises:
            UserError: the experiment does not run, or the value is invalid; the message has every error.
        """
        self._update("SEARCH_SPACE", "searchSpace", value)

    def enqueue_trial(self, parameters: Mapping[str, Any]) -> str:
        """Start a trial with these parameters before the tuner's next one, and return its id.

        No tuner draws missing parameters. A warning names them, and values outside the search space.

        Raises:
            UserError: the experiment does not run. Before its start, `config.initial_trials` has the first trials.
            UserError: these are no parameters.
        """
        if not isinstance(parameters, Mapping):
            raise UserError(
                f'cannot start a trial with {parameters!r}: it is not a mapping; pass the parameters, such as {{"lr": 0.1}}'
            )
        if self.id is None:
            raise NotStarted(
                "cannot start a trial of an experiment that has not been started; call start() first, or write "
                f"config.initial_trials = [{dict(parameters)!r}]"
            )
        with in_python_terms():
            started = add_trial(self._client_to("start a trial of"), plain(parameters))
        return str(started["trialJobId"])

    def import_data(self, results: Sequence[TrialResult | Mapping[str, Any]]) -> int:
        """Pass results of other trials, each with `parameter` and `value`, to the tuner; returns how many it uses.

        Results without a finite number, such as NaN, are skipped with a warning.

        Raises:
            UserError: the experiment does not run, a result is invalid, or none has a finite number.
        """
        given = plain(results)
        if not isinstance(given, list):
            raise UserError(
                f"cannot import results from an object of type {type(results).__name__}: it is not a list; pass a list, such as "
                "that of export_data()"
            )
        given = [vars(each) if isinstance(each, TrialResult) else each for each in given]
        with in_python_terms():
            found = import_results(self._client_to("import results into"), finite(plain(given)))
        return int(found["used"])

    def kill_trial_job(self, trial_job_id: str) -> None:
        """Stop one trial; the experiment continues.

        Raises:
            UserError: no trial has this id, the trial is terminal, or the experiment does not run.
        """
        self.get_trial_job(trial_job_id)
        with in_python_terms():
            self._client_to("stop a trial of").delete("/trial-jobs", trial_job_id)

    # ---- private

    def _remarks(self) -> Remarks:
        from nni_manager.client.remarks import remarks_of

        return self._query(remarks_of)

    def _change_remarks(
        self,
        trial_id: str | None,
        add: Iterable[str] = (),
        remove: Iterable[str] = (),
        note: str | None = None,
    ) -> Remarks:
        from nni_manager.client.remarks import change_remarks
        from nni_manager.domain.remarks import RemarksChange

        if isinstance(remove, str):
            remove = (remove,)  # not its letters
        change = RemarksChange.of(add, remove, note)
        return self._query(lambda known: change_remarks(known, change, trial_id))

    def _now(self) -> KnownExperiment:
        if self._folder is None:
            if self.id is None:
                raise NotStarted
            self._folder = known_by_id(self.id).folder
        known = known_experiment(self._folder)
        if known is None:
            raise UserError(f"cannot query experiment {self.id}: it was deleted; start another")
        return known

    def _query(self, query: Callable[[KnownExperiment], _Answer]) -> _Answer:
        """The answer of the manager, or of the store after the manager's exit."""
        known = self._now()
        with in_python_terms():
            try:
                return query(known)
            except ManagerUnresponsive:
                known = self._now()
                if known.manager is not None:
                    raise
                return query(known)

    def _get(self, path: str, *names: str) -> Any:
        return self._query(lambda known: known.get(path, *names))

    def _client_to(self, what: str) -> Any:
        client = self._now().client()
        if client is None:
            raise UserError(
                f"cannot {what} experiment {self.id}: it does not run; Experiment.resume({self.id!r}) resumes it"
            )
        return client

    def _update(self, update_type: str, key: str, value: Any) -> None:
        with in_python_terms():
            self._client_to("change").put("/experiment", {"params": {key: value}}, update_type=update_type)


def _note(given: Any) -> Any:
    if given is None:  # which a change of remarks ignores
        raise UserError('cannot use None as a note: it is no text; pass a text, or "" to remove the note')
    return given


def known_by_id(experiment_id: str) -> KnownExperiment:
    """The experiment of this exact id. Prefixes are refused, because a program may request digits1 while digits10 exists.

    Raises:
        UserError: the experiment does not exist.
    """
    found = resolve(experiment_id)
    if found.experiment_id != experiment_id:
        raise UserError(
            f"cannot find experiment {experiment_id!r}; did you mean {found.experiment_id}? "
            "`nnictl experiment list --all` lists them"
        )
    return found
