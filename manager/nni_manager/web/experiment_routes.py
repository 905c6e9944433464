"""The routes of one experiment, its trials and their metrics: decode, one call, encode."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from nni_manager.config.changes import UPDATE_TYPES
from nni_manager.domain.remarks import RemarksChange
from nni_manager.domain.trial import Trial
from nni_manager.engine import profiles, serializers, trial_logs
from nni_manager.engine.importance import Importance, importance_of
from nni_manager.engine.listing import experiments_view
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.store.reader import StoreReader
from nni_manager.web.backend_reads import BackendReads
from nni_manager.web.json_encoding import Json, body_of, to_json
from nni_manager.web.openapi import MANY, MAPPING, ONE, Operation, Schema
from nni_manager.web.query_values import MAX_DIGITS, STATUSES, nni_status, whole_number

# Enough for a search space, or for 10,000 results with a few hundred bytes of parameters each.
MAX_CHANGE_BYTES = 4 * 1024 * 1024
# Limits the response for a trial that the cluster restarts often.
MAX_ATTEMPTS = 100
MAX_ENDED_JOBS = 200
# Open pages may show the importance for different metrics.
MAX_IMPORTANCES = 8
# The query parameter `from` of a retry.
RETRY_FROM = ("start", "checkpoint")
_LAST_SEQUENCE_ID = 2**62
# The query parameter `type` of metrics; None: both types.
_IS_FINAL = {None: None, "FINAL": True, "PERIODICAL": False}


class ExperimentRoutes:
    """Queries and changes of one experiment. `end` ends the manager's process once the experiment is terminal."""

    def __init__(self, reads: BackendReads, end: Callable[[], None]) -> None:
        self._reads = reads
        self._engine = reads.engine
        self._end = end
        self._importances: dict[tuple[str, int], Importance] = {}
        """The last evaluated ones, oldest first, by metric and number of results."""
        self._importance_lock = asyncio.Lock()

    def operations(self) -> list[Operation]:
        """All operations."""
        view_of = self._view_operation
        of_type = {"type": {"type": "string", "enum": ["FINAL", "PERIODICAL"]}}
        log_range: dict[str, Schema] = {
            "attempt": {"type": "integer", "minimum": 0},
            "task": {"type": "string"},
            "from": {"type": "integer"},
            "limit": {
                "type": "integer",
                "minimum": trial_logs.MIN_RANGE_BYTES,
                "maximum": trial_logs.MAX_RANGE_BYTES,
            },
        }
        params = {"type": "object", "required": ["params"], "properties": {"params": MAPPING}}
        update_type = {"update_type": {"type": "string", "enum": list(UPDATE_TYPES)}}
        retry_from = {"from": {"type": "string", "enum": list(RETRY_FROM)}}
        tags = {"type": "array", "items": {"type": "string"}}
        remarks = {
            "type": "object",
            "additionalProperties": False,
            "properties": {"addTags": tags, "removeTags": tags, "note": {"type": "string"}},
        }
        at, large = "/trials/{trial_id}", MAX_CHANGE_BYTES
        return [
            view_of("/check-status", "check_status", "The experiment's state.", serializers.status_view),
            view_of("/summary", "summary", "A summary of the experiment.", serializers.summary_view),
            view_of("/experiment", "experiment", "The experiment's profile.", profiles.profile_view),
            Operation("/experiment", self.stop_experiment, ONE, "DELETE", 202),
            Operation(
                "/experiment", self.update, ONE, "PUT", query=update_type, body=params, most_body_bytes=large
            ),
            Operation("/experiment/imported-data", self.imported, MANY),
            Operation(
                "/experiment/import-data", self.import_data, ONE, "POST", body=MANY, most_body_bytes=large
            ),
            view_of(
                "/job-statistics",
                "statistics",
                "Counts of trials by status, without zero counts.",
                lambda snapshot: serializers.statistics_view(snapshot.experiment),
                MANY,
            ),
            Operation("/trials", self.trials, MANY, query={"status": {"type": "string", "enum": STATUSES}}),
            Operation("/trial-jobs", self.propose, ONE, "POST", body=MAPPING, refusals=(409,)),
            Operation(at, self.trial, ONE, refusals=(404,)),
            Operation("/trial-jobs/{trial_id}", self.stop_trial, ONE, "DELETE", 202, refusals=(404, 409)),
            Operation(f"{at}/retry", self.retry, ONE, "POST", query=retry_from, refusals=(404, 409)),
            Operation(
                f"{at}/remarks", self.change_remarks_of_trial, ONE, "PATCH", refusals=(404,), body=remarks
            ),
            Operation("/remarks", self.change_remarks, ONE, "PATCH", body=remarks),
            Operation(f"{at}/usage", self.usage_of_trial, MANY, refusals=(404,)),
            Operation(f"{at}/attempts", self.attempts_of_trial, MANY, refusals=(404,)),
            Operation(f"{at}/log/{{stream}}", self.log_of_trial, ONE, query=log_range, refusals=(404,)),
            Operation("/packages/{digest}", self.packages, MANY, refusals=(404,)),
            Operation("/importance", self.importance, ONE, query={"metric": {"type": "string"}}),
            Operation("/jobs", self.jobs, MANY),
            Operation("/jobs/{job_id}/log", self.log_of_job, MANY, refusals=(404,)),
            Operation("/gpus", self.gpus, MANY),
            Operation("/experiments", self.experiments, MANY),
            view_of(
                "/configuration",
                "configuration",
                "The experiment's current configuration, without credentials.",
                profiles.configuration_view,
            ),
            Operation("/metric-data", self.metrics, MANY, query=of_type),
            Operation("/metric-data/{trial_id}", self.metrics_of_trial, MANY, query=of_type, refusals=(404,)),
            Operation("/metric-data-latest", self.latest_metrics, MANY),
            Operation("/metric-data-range/{first}/{last}", self.metrics_in_range, MANY),
            view_of(
                "/export-data",
                "export",
                "Parameters and final results of the trials.",
                lambda snapshot: serializers.export_view(snapshot.experiment),
                MANY,
            ),
        ]

    def _view_operation(
        self,
        path: str,
        name: str,
        summary: str,
        view: Callable[[ExperimentSnapshot], Any],
        answer: Schema = ONE,
    ) -> Operation:
        """An operation that answers with a view of the current snapshot."""

        async def endpoint(_: Request) -> Response:
            return Json(view(self._engine.snapshot()))

        endpoint.__name__, endpoint.__doc__ = name, summary
        return Operation(path, endpoint, answer)

    async def stop_experiment(self, _: Request) -> Response:
        """Stop the experiment and end the manager; the response does not wait for either."""
        self._engine.stop()
        self._end()
        return Json({"status": self._engine.snapshot().experiment.state.value}, status_code=202)

    async def update(self, request: Request) -> Response:
        """Change a limit or the search space durably. update_type names it; the body is a profile with its params."""
        commands = self._engine.commands
        update_type = request.query_params.get("update_type", "")
        profile = await body_of(request)
        params = profile.get("params") if isinstance(profile, dict) else None
        if not isinstance(params, dict):
            raise HTTPException(
                400,
                'cannot change the experiment: the body has no params; send {"params": {"maxTrialNum": 20}}',
            )
        await commands.update(update_type, params)
        return Json({})

    async def import_data(self, request: Request) -> Response:
        """Import results of other experiments into the tuner: all of them, or none if one is invalid."""
        return Json(await self._engine.commands.import_data(await body_of(request)))

    async def imported(self, _: Request) -> Response:
        """The results of other experiments that were imported into the tuner."""
        return await self._reads.from_store(lambda reader: Json(serializers.imported_view(reader.imported())))

    async def propose(self, request: Request) -> Response:
        """Start a trial with the given parameters, regardless of the tuner and of all limits."""
        commands = self._engine.commands
        parameters = await body_of(request)
        if not isinstance(parameters, dict):
            raise HTTPException(
                400, 'cannot start a trial: its parameters are not a mapping; send e.g. {"lr": 0.1}'
            )
        return self._started(await commands.propose(parameters))

    async def retry(self, request: Request) -> Response:
        """Start a trial with the parameters of a terminal trial that did not succeed; the old trial is unchanged.

        `from`: whether the new trial starts at its first step, the default, or from the newest checkpoint of the old one.
        """
        given = request.query_params.get("from", RETRY_FROM[0])
        if given not in RETRY_FROM:
            raise HTTPException(400, f"cannot retry from {given!r}; write {' or '.join(RETRY_FROM)}")
        trial = self._reads.trial_of(request)
        is_continued = given == RETRY_FROM[1]
        return self._started(await self._engine.commands.retry(trial, from_checkpoint=is_continued))

    async def change_remarks(self, request: Request) -> Response:
        """Add and remove tags of the experiment, or set its note. A repeated request has no further effect."""
        return await self._change_remarks(request, None)

    async def change_remarks_of_trial(self, request: Request) -> Response:
        """Add and remove tags of one trial, or set its note. A repeated request has no further effect."""
        return await self._change_remarks(request, self._reads.trial_of(request))

    async def _change_remarks(self, request: Request, trial: Trial | None) -> Response:
        commands = self._engine.commands
        change = RemarksChange.from_json(await body_of(request))
        return Json((await commands.change_remarks(change, trial)).to_json())

    @staticmethod
    def _started(trial: Trial) -> Response:
        return Json({"sequenceId": trial.sequence_id, "trialJobId": trial.trial_id})

    async def trials(self, request: Request) -> Response:
        """All trials, or those with one status."""
        status = nni_status(request)
        snapshot = self._engine.snapshot()
        trials = snapshot.experiment.trials.values()
        return Json(
            [
                serializers.trial_view(snapshot, trial)
                for trial in trials
                if status in (None, trial.state.nni_status)
            ]
        )

    async def trial(self, request: Request) -> Response:
        """One trial, and what ran: the code, and each attempt's host, Python and packages.

        `hasCheckpoint`: whether it has saved a checkpoint, or continues from one.
        """
        trial_id = self._reads.trial_of(request).trial_id
        environments, marks = await self._reads.from_store(
            lambda reader: (reader.environments(trial_id), reader.marks(trial_id))
        )
        snapshot, trial = self._engine.snapshot(), self._reads.trial_of(request)
        return Json(serializers.whole_trial_view(snapshot, trial, environments.get(trial_id, ()), marks))

    async def packages(self, request: Request) -> Response:
        """The packages of a list by its digest, as NAME==VERSION."""
        digest = request.path_params["digest"]
        found = await self._reads.from_store(lambda reader: reader.packages(digest))
        if found is None:
            raise HTTPException(404, f"cannot find packages {digest!r}; `nnictl trial show` has the digests")
        return Json(found)

    async def stop_trial(self, request: Request) -> Response:
        """Stop one trial; the response does not wait for its end."""
        trial = self._reads.trial_of(request)
        if trial.state.is_terminal:
            raise HTTPException(409, f"cannot stop trial {trial.trial_id}: it is {trial.state.value} already")
        self._engine.stop_trial(trial.trial_id)
        return Json(serializers.trial_view(self._engine.snapshot(), trial), status_code=202)

    async def usage_of_trial(self, request: Request) -> Response:
        """The resource usage samples of one trial."""
        trial_id = self._reads.trial_of(request).trial_id
        return await self._reads.from_store(
            lambda reader: Json(serializers.usage_samples_view(reader.usage_of(trial_id)))
        )

    async def attempts_of_trial(self, request: Request) -> Response:
        """The attempts of one trial with their tasks, and the sizes of their streams."""
        trial_id, folder = self._reads.trial_of(request).trial_id, self._engine.folder

        def read() -> Any:
            attempts = trial_logs.attempts_of(folder, trial_id)[-MAX_ATTEMPTS:]
            return serializers.attempts_view([(each, trial_logs.sizes_of(folder, each)) for each in attempts])

        return Json(await self._reads.from_storage(read))

    async def log_of_trial(self, request: Request) -> Response:
        """A range of a stream of one trial, of its newest attempt or of a given one. `from` below 0 counts from the end."""
        trial = self._reads.trial_of(request)
        stream = next((each for each in trial_logs.LOGS if each.value == request.path_params["stream"]), None)
        if stream is None:
            names = ", ".join(each.value for each in trial_logs.LOGS)
            raise HTTPException(404, f"cannot find this log of trial {trial.trial_id}: its logs are {names}")
        limits = trial_logs.MIN_RANGE_BYTES, trial_logs.MAX_RANGE_BYTES
        read = partial(
            trial_logs.read_range,
            self._engine.folder,
            trial.trial_id,
            stream,
            first=whole_number(request, "from", -(10**MAX_DIGITS), 10**MAX_DIGITS) or 0,
            most_bytes=whole_number(request, "limit", *limits) or max(limits),
            attempt=whole_number(request, "attempt", 0, 10**9),
            task=request.query_params.get("task"),
            is_whole=trial.state.is_terminal,
        )
        found = await self._reads.from_storage(read)
        return Json(
            {"size": found.size_bytes, "from": found.first, "text": found.text, "next": found.following}
        )

    async def importance(self, request: Request) -> Response:
        """The importance of each hyper-parameter for the best results; `why` has the reason if there is none."""
        snapshot = self._engine.snapshot()
        objectives = snapshot.experiment.leaderboard.objectives
        metric = request.query_params.get("metric") or objectives.first.metric
        results = [
            (trial.parameters, trial.result)
            for trial in snapshot.experiment.trials.values()
            if trial.result is not None
        ]
        key = metric, len(results)
        async with self._importance_lock:  # concurrent requests share one evaluation
            if key not in self._importances:
                of_metric = next((each for each in objectives.all if each.metric == metric), objectives.first)
                maximize = of_metric.mode == "maximize"
                evaluate = partial(importance_of, results, metric, maximize=maximize)
                self._importances[key] = await asyncio.to_thread(evaluate)
                if len(self._importances) > MAX_IMPORTANCES:
                    del self._importances[next(iter(self._importances))]
            found = self._importances[key]
        return Json(found.to_json())

    async def jobs(self, _: Request) -> Response:
        """The active jobs and the newest terminal ones, with their trials and transports."""
        stored = await self._reads.from_store(lambda reader: reader.newest_jobs(MAX_ENDED_JOBS))
        return Json(serializers.jobs_view(self._engine.snapshot(), stored))

    async def log_of_job(self, request: Request) -> Response:
        """The end of what each task of a job has written, as its cluster keeps it: `task` and `text`."""
        job_id, job_log = request.path_params["job_id"], self._engine.snapshot().job_log
        if job_log is None:
            raise HTTPException(
                404,
                "cannot show the log of a job: its cluster keeps none, or no manager runs; see the trials' logs",
            )
        stored = await self._reads.from_store(lambda reader: reader.newest_jobs(MAX_ENDED_JOBS))
        if job_id not in {job.job_id for job in stored}:
            raise HTTPException(404, f"cannot find job {job_id[:100]!r}; choose one of GET /jobs")
        ends = await job_log(job_id)
        return Json([{"task": task, "text": text} for task, text in ends.items()])

    async def gpus(self, _: Request) -> Response:
        """The GPUs that the manager assigns to trials, with their trials. Only on its own machine."""
        gpus = await self._engine.snapshot().gpus()
        return Json(serializers.gpus_view(self._engine.snapshot(), gpus))

    async def experiments(self, _: Request) -> Response:
        """All experiments of the manager's user, with the address of each that is served."""
        return Json(await asyncio.to_thread(experiments_view, self._engine.folder))

    async def metrics(self, request: Request) -> Response:
        """The metric records of all trials."""
        return await self._pages(_is_final(request), lambda _: (0, _LAST_SEQUENCE_ID))

    async def metrics_of_trial(self, request: Request) -> Response:
        """The metric records of one trial."""
        is_final, trial_id = _is_final(request), self._reads.trial_of(request).trial_id
        return await self._pages(is_final, lambda reader: reader.sequence_ids_of(trial_id))

    async def metrics_in_range(self, request: Request) -> Response:
        """The metric records of the trials in this range of sequence numbers, both ends included."""
        first, last = _sequence_id(request, "first"), _sequence_id(request, "last")
        return await self._pages(None, lambda _: (first, last))

    async def latest_metrics(self, _: Request) -> Response:
        """All final results, and the newest intermediate result of each trial."""

        def view(reader: StoreReader) -> Response:
            rows = (*reader.metrics(is_final=True), *reader.latest_intermediates())
            return Json([serializers.metric_view(row) for row in rows])

        return await self._reads.from_store(view)

    async def _pages(
        self, is_final: bool | None, between: Callable[[StoreReader], tuple[int, int]]
    ) -> Response:
        """Stream the records in pages: there may be too many for memory, and the client may be slow."""

        def read() -> Iterator[bytes]:
            lead = b"["
            with StoreReader(self._engine.folder.database) as reader:
                for page in reader.metric_pages(is_final, *between(reader)):
                    yield lead + b",".join(to_json(serializers.metric_view(row)) for row in page)
                    lead = b","
            yield b"[]" if lead == b"[" else b"]"

        pages = read()
        # Read the first page before the response starts, so that an unreadable store gives an error status.
        first = await asyncio.to_thread(next, pages)
        return StreamingResponse(chain((first,), pages), media_type=Json.media_type)


def _sequence_id(request: Request, name: str) -> int:
    text = request.path_params[name]
    # Checked before int(), which raises on thousands of digits; the database holds 18.
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise HTTPException(400, f"cannot use {text[:MAX_DIGITS]!r} as a trial's number: write it in digits")
    return int(text)


def _is_final(request: Request) -> bool | None:
    given = request.query_params.get("type")
    if given not in _IS_FINAL:
        raise HTTPException(400, f"cannot use type={given}: write FINAL or PERIODICAL")
    return _IS_FINAL[given]
