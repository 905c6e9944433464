"""The HTTP API under /api/v1/nni: decode, one call, encode."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from nni_manager.config.changes import UPDATE_TYPES
from nni_manager.domain.trial import Trial
from nni_manager.engine import serializers
from nni_manager.engine.experiment_commands import FailedPrecondition
from nni_manager.engine.importance import Importance, importance_of
from nni_manager.engine.listing import experiments_view
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.storage_executor import StorageExecutor
from nni_manager.engine.stored_experiment import ViewOnly
from nni_manager.engine.trial_logs import (
    LOGS,
    MAX_RANGE_BYTES,
    MIN_RANGE_BYTES,
    attempts_of,
    read_range,
    sizes_of,
)
from nni_manager.errors import RetryableError, UserError
from nni_manager.http_server import LingeringCloseMiddleware, mark_streaming
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import MetricRow, SeenJob
from nni_manager.web.auth_middleware import AuthMiddleware
from nni_manager.web.change_feed import MAX_FOLLOWERS, ChangeFeed, Cursor
from nni_manager.web.compression import packed, takes_gzip
from nni_manager.web.files import PLACES, Files
from nni_manager.web.json_encoding import to_json
from nni_manager.web.openapi import Operation, document
from nni_manager.web.session_auth import CODE_S, SESSION_S, SessionAuth
from trial_keeper import __version__

Answer = TypeVar("Answer")
API_ROOT = "/api/v1/nni"
# Enough for a search space, or for 10,000 results with a few hundred bytes of parameters each.
MAX_CHANGE_BYTES = 4 * 1024 * 1024
# A login code in JSON. Small, since unauthenticated clients may send one.
MAX_CODE_BYTES = 1024
# For trials that the cluster restarts often.
MAX_ATTEMPTS = 100
MAX_ENDED_JOBS = 200
# Long enough for a storage that is only slow.
STORAGE_TIMEOUT_S = 10.0
_MAX_DIGITS = 18
_LAST_SEQUENCE_ID = 2**62


class Json(JSONResponse):
    """A JSON response. NaN and infinities become null: they are valid metrics, but JSON has none."""

    def render(self, content: Any) -> bytes:
        """The encoded body."""
        return to_json(content)


class CommandPort(Protocol):
    """See `engine.experiment_commands.ExperimentCommands`."""

    async def update(self, update_type: str, params: Mapping[str, Any]) -> None:
        """Change one limit, or the search space."""

    async def import_data(self, raw: Any) -> dict[str, int]:
        """Import results of other experiments into the tuner."""

    async def propose(self, parameters: Mapping[str, Any]) -> Trial:
        """Create a trial with these parameters."""

    async def retry(self, trial: Trial) -> Trial:
        """Create a trial with the parameters of a terminal trial that did not succeed."""


class ExperimentBackend(Protocol):
    """The backend of the routes: the engine of an experiment, or a read-only view of a stored one, which rejects changes."""

    folder: ExperimentFolder

    def snapshot(self) -> ExperimentSnapshot:
        """The current state of the experiment."""

    def stop(self) -> None:
        """Stop the experiment."""

    def stop_trial(self, trial_id: str) -> None:
        """Stop one trial, which must exist."""

    @property
    def changes(self) -> CommandPort:
        """The commands that change the experiment while it runs."""


class ManagerApi:
    """The routes. `end` ends the manager's process once the experiment is terminal.

    `host` and `port`: the listen address.
    """

    def __init__(
        self,
        engine: ExperimentBackend,
        host: str,
        port: int,
        session_auth: SessionAuth,
        end: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._host = host
        self._port = port
        self._session_auth = session_auth
        self._end = end
        self._files = Files()
        self._live = ChangeFeed(engine.snapshot)
        self._storage = StorageExecutor()
        self._importance: tuple[tuple[str, int], Importance] | None = None
        """The last evaluated importance, keyed by metric and number of results."""
        self._importance_lock = asyncio.Lock()

    def operations(self) -> list[Operation]:
        """All operations of the API."""
        one, many = {"type": "object"}, {"type": "array", "items": {"type": "object"}}
        at_all = {"type": "object", "additionalProperties": True}
        since = {"since": {"type": "string"}}
        of_type = {"type": {"type": "string", "enum": ["FINAL", "PERIODICAL"]}}
        return [
            Operation("/openapi.json", self.description, one),
            Operation("/version", self.version, None),
            Operation("/entrance", self.new_link, one, method="POST"),
            Operation(
                "/session",
                self.begin_session,
                one,
                method="POST",
                body=at_all,
                most_body_bytes=MAX_CODE_BYTES,
            ),
            Operation("/session", self.end_session, one, method="DELETE"),
            Operation("/changes", self.news, one, query=since),
            Operation("/events", self.events, None, query=since, media_type="text/event-stream"),
            Operation("/check-status", self.check_status, one),
            Operation("/summary", self.summary, one),
            Operation("/experiment", self.experiment, one),
            Operation("/experiment", self.stop_experiment, one, method="DELETE", status=202),
            Operation(
                "/experiment",
                self.update,
                one,
                method="PUT",
                query={"update_type": {"type": "string", "enum": list(UPDATE_TYPES)}},
                body={"type": "object", "required": ["params"], "properties": {"params": at_all}},
                most_body_bytes=MAX_CHANGE_BYTES,
            ),
            Operation("/experiment/imported-data", self.imported, many),
            Operation(
                "/experiment/import-data",
                self.import_data,
                one,
                method="POST",
                body=many,
                most_body_bytes=MAX_CHANGE_BYTES,
            ),
            Operation("/experiment-metadata", self.metadata, one),
            Operation("/job-statistics", self.statistics, many),
            Operation("/trial-jobs", self.trials, many, query={"status": {"type": "string"}}),
            Operation("/trial-jobs", self.propose, one, method="POST", body=at_all, refusals=(409,)),
            Operation("/trial-jobs/{trial_id}", self.trial, one, refusals=(404,)),
            Operation(
                "/trial-jobs/{trial_id}",
                self.stop_trial,
                one,
                method="DELETE",
                status=202,
                refusals=(404, 409),
            ),
            Operation("/trial-jobs/{trial_id}/retry", self.retry, one, method="POST", refusals=(404, 409)),
            Operation("/trial-jobs/{trial_id}/usage", self.usage_of_trial, many, refusals=(404,)),
            Operation("/trial-jobs/{trial_id}/attempts", self.attempts_of_trial, many, refusals=(404,)),
            Operation(
                "/trial-jobs/{trial_id}/log/{stream}",
                self.log_of_trial,
                one,
                query={
                    "attempt": {"type": "integer", "minimum": 0},
                    "task": {"type": "string"},
                    "from": {"type": "integer"},
                    "limit": {
                        "type": "integer",
                        "minimum": MIN_RANGE_BYTES,
                        "maximum": MAX_RANGE_BYTES,
                    },
                },
                refusals=(404,),
            ),
            Operation("/importance", self.importance, one, query={"metric": {"type": "string"}}),
            Operation("/jobs", self.jobs, many),
            Operation("/experiments", self.experiments, many),
            Operation("/configuration", self.configuration, one),
            Operation("/metric-data", self.metrics, many, query=of_type),
            Operation("/metric-data/{trial_id}", self.metrics_of_trial, many, query=of_type, refusals=(404,)),
            Operation("/metric-data-latest", self.latest_metrics, many),
            Operation("/metric-data-range/{first}/{last}", self.metrics_in_range, many),
            Operation("/export-data", self.export, many),
        ]

    def app(self) -> Starlette:
        """The ASGI application."""
        operations = self.operations()
        routes = [operation.route() for operation in operations]
        roomy = {(each.method, API_ROOT + each.path): each.most_body_bytes for each in operations}
        shown = [Route(path, self.file) for path in (*PLACES, "/page/{file:path}")]
        return Starlette(
            routes=[Mount(API_ROOT, routes=routes), Route("/", self.first_page), *shown],
            middleware=[
                Middleware(LingeringCloseMiddleware),
                Middleware(
                    AuthMiddleware,
                    session_auth=self._session_auth,
                    host=self._host,
                    most_body_bytes=roomy,
                    is_public=self._is_public,
                    for_programs={("POST", f"{API_ROOT}/entrance")},
                ),
            ],
            exception_handlers={
                HTTPException: _refuse,
                UserError: _refuse_mistake,
                FailedPrecondition: _refuse_in_this_state,
                RetryableError: _refuse_for_now,
                ViewOnly: _refuse_change,
            },
        )

    def _is_public(self, method: str, path: str) -> bool:
        """True for the page's files, and for the exchange of a login code for a session."""
        if (method, path) == ("POST", f"{API_ROOT}/session"):
            return True
        return method in ("GET", "HEAD") and (path == "/" or path in self._files)

    # ---- the page

    async def first_page(self, _: Request) -> Response:
        """Redirect to the overview page."""
        return RedirectResponse("/oview")

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        path = request.url.path
        if path not in self._files:
            raise HTTPException(404, "cannot find this file of the page; reload the page")
        return await asyncio.to_thread(self._files.answer, path, request.headers)

    async def new_link(self, _: Request) -> Response:
        """A single-use login code for a browser, for the page at /enter#CODE."""
        return Json({"code": self._session_auth.new_login_code(), "expiresInS": CODE_S})

    async def begin_session(self, request: Request) -> Response:
        """Exchange a login code for a session: a cookie, and a key to send in the header X-Trial-Keeper."""
        sent = await _body_of(request)
        code = sent.get("code") if isinstance(sent, dict) else None
        session = self._session_auth.begin(code) if isinstance(code, str) else None
        if session is None:
            raise HTTPException(
                403,
                "cannot let you in by this link: it was used already, or is older than "
                f"{CODE_S // 60} minutes; `nnictl webui url` prints another",
            )
        answer = Json({"key": session.key})
        answer.set_cookie(
            self._session_auth.cookie_name,
            session.cookie,
            max_age=SESSION_S,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        # Otherwise a browser with a hundred experiments in a week would exceed the header limit and be rejected by all.
        for name in self._session_auth.too_old(request.cookies):
            answer.delete_cookie(name, secure=request.url.scheme == "https", httponly=True, samesite="strict")
        return answer

    async def end_session(self, request: Request) -> Response:
        """Sign out the calling page; it needs a new link to sign in again."""
        if cookie := request.cookies.get(self._session_auth.cookie_name):
            self._session_auth.end(cookie)
        answer = Json({})
        answer.delete_cookie(
            self._session_auth.cookie_name,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    async def news(self, request: Request) -> Response:
        """The summary, and the trials changed since a version; all trials without a version, or with another process's."""
        return _streamed(request, self._live.news(_since(request)), Json.media_type)

    async def events(self, request: Request) -> Response:
        """The same as a stream of server-sent events, at most two per second."""
        since = _since(request)
        if self._live.followers >= MAX_FOLLOWERS:
            raise HTTPException(
                503,
                f"cannot tell you more as it comes: {MAX_FOLLOWERS} others are told already; ask for changes",
            )
        mark_streaming(request.scope)
        # Counted here and not when the stream starts, since other requests are admitted in between. Nothing is awaited until
        # the response is called, which decrements the count at its end.
        self._live.followers += 1
        return _Follower(self._live, _streamed(request, self._live.follow(since), "text/event-stream"))

    # ---- the experiment

    async def description(self, _: Request) -> Response:
        """This description."""
        return Json(document(self.operations(), API_ROOT, self._session_auth.cookie_name))

    async def version(self, _: Request) -> Response:
        """The manager's version."""
        return PlainTextResponse(__version__)

    async def check_status(self, _: Request) -> Response:
        """The experiment's state."""
        return Json(serializers.status_view(self._engine.snapshot()))

    async def summary(self, _: Request) -> Response:
        """A summary of the experiment."""
        return Json(serializers.summary_view(self._engine.snapshot()))

    async def experiment(self, _: Request) -> Response:
        """The experiment's profile."""
        return Json(serializers.profile_view(self._engine.snapshot()))

    async def stop_experiment(self, _: Request) -> Response:
        """Stop the experiment and end the manager; responds before that is done."""
        self._engine.stop()
        self._end()
        return Json({"status": self._engine.snapshot().experiment.state.value}, status_code=202)

    async def update(self, request: Request) -> Response:
        """Change a limit or the search space durably. update_type names it; the body is a profile with its params."""
        changes = self._engine.changes
        update_type = request.query_params.get("update_type", "")
        profile = await _body_of(request)
        params = profile.get("params") if isinstance(profile, dict) else None
        if not isinstance(params, dict):
            raise HTTPException(
                400, 'cannot change the experiment: there are no params; send {"params": {"maxTrialNum": 20}}'
            )
        await changes.update(update_type, params)
        return Json({})

    async def import_data(self, request: Request) -> Response:
        """Import results of other experiments into the tuner: all of them, or none if one is invalid."""
        changes = self._engine.changes
        return Json(await changes.import_data(await _body_of(request)))

    async def imported(self, _: Request) -> Response:
        """The results of other experiments that were imported into the tuner."""
        return await self._read(lambda reader: serializers.imported_view(reader.imported()))

    async def propose(self, request: Request) -> Response:
        """Start a trial with the given parameters, regardless of the tuner and of all limits."""
        changes = self._engine.changes
        parameters = await _body_of(request)
        if not isinstance(parameters, dict):
            raise HTTPException(
                400, 'cannot begin a trial: its parameters are no mapping; send {"lr": 0.1}, say'
            )
        return self._begun(await changes.propose(parameters))

    async def retry(self, request: Request) -> Response:
        """Start a trial with the parameters of a terminal trial that did not succeed; the old trial is unchanged."""
        changes = self._engine.changes
        return self._begun(await changes.retry(self._trial_of(request)))

    @staticmethod
    def _begun(trial: Trial) -> Response:
        return Json({"sequenceId": trial.sequence_id, "trialJobId": trial.trial_id})

    async def metadata(self, _: Request) -> Response:
        """The experiment as an item of a list of experiments."""
        return Json(serializers.metadata_view(self._engine.snapshot()) | {"port": self._port})

    async def statistics(self, _: Request) -> Response:
        """Counts of trials by status, without zero counts."""
        return Json(serializers.statistics_view(self._engine.snapshot().experiment))

    async def trials(self, request: Request) -> Response:
        """All trials, or those with one status."""
        status = request.query_params.get("status")
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
        """One trial."""
        return Json(serializers.trial_view(self._engine.snapshot(), self._trial_of(request)))

    async def stop_trial(self, request: Request) -> Response:
        """Stop one trial; responds before it has ended."""
        trial = self._trial_of(request)
        if trial.state.is_terminal:
            raise HTTPException(409, f"cannot stop trial {trial.trial_id}: it is {trial.state.value} already")
        self._engine.stop_trial(trial.trial_id)
        return Json(serializers.trial_view(self._engine.snapshot(), trial), status_code=202)

    async def usage_of_trial(self, request: Request) -> Response:
        """The resource usage samples of one trial."""
        trial_id = self._trial_of(request).trial_id
        return await self._read(lambda reader: serializers.usage_samples_view(reader.usage_of(trial_id)))

    async def attempts_of_trial(self, request: Request) -> Response:
        """The attempts of one trial with their tasks, and the sizes of their streams."""
        trial_id, folder = self._trial_of(request).trial_id, self._engine.folder

        def look() -> Any:
            attempts = attempts_of(folder, trial_id)[-MAX_ATTEMPTS:]
            return serializers.attempts_view([(each, sizes_of(folder, each)) for each in attempts])

        return Json(await self._from_storage(look))

    async def log_of_trial(self, request: Request) -> Response:
        """A range of a stream of one trial, of its newest attempt or of a given one. `from` below 0 counts from the end."""
        trial = self._trial_of(request)
        stream = next((each for each in LOGS if each.value == request.path_params["stream"]), None)
        if stream is None:
            words = ", ".join(each.value for each in LOGS)
            raise HTTPException(404, f"cannot find this log of trial {trial.trial_id}: there are {words}")
        read = partial(
            read_range,
            self._engine.folder,
            trial.trial_id,
            stream,
            first=_whole_number(request, "from", -(10**_MAX_DIGITS), 10**_MAX_DIGITS) or 0,
            most_bytes=_whole_number(request, "limit", MIN_RANGE_BYTES, MAX_RANGE_BYTES) or MAX_RANGE_BYTES,
            attempt=_whole_number(request, "attempt", 0, 10**9),
            task=request.query_params.get("task"),
            is_whole=trial.state.is_terminal,
        )
        found = await self._from_storage(read)
        return Json(
            {"size": found.size_bytes, "from": found.first, "text": found.text, "next": found.following}
        )

    async def importance(self, request: Request) -> Response:
        """The importance of each hyper-parameter for the best results; `why` has the reason if there is none."""
        metric = request.query_params.get("metric") or "default"
        snapshot = self._engine.snapshot()
        results = [
            (trial.parameters, trial.result)
            for trial in snapshot.experiment.trials.values()
            if trial.result is not None
        ]
        key = metric, len(results)
        async with self._importance_lock:  # concurrent requests share one evaluation
            if self._importance is None or self._importance[0] != key:
                maximize = snapshot.experiment.leaderboard.maximize
                evaluate = partial(importance_of, results, metric, maximize=maximize)
                self._importance = key, await asyncio.to_thread(evaluate)
        found = self._importance[1]
        shares = [{"name": name, "value": share} for name, share in found.shares.items()]
        return Json({"importances": shares, "trials": found.trials, "why": found.why})

    async def jobs(self, _: Request) -> Response:
        """The active jobs and the newest terminal ones, with their trials and transports."""
        stored = await asyncio.to_thread(self._stored_jobs)
        return Json(serializers.jobs_view(self._engine.snapshot(), stored))

    def _stored_jobs(self) -> list[SeenJob]:
        with StoreReader(self._engine.folder.database) as reader:
            return reader.newest_jobs(MAX_ENDED_JOBS)

    async def experiments(self, _: Request) -> Response:
        """All experiments of the manager's user, with the address of each that is served."""
        return Json(await asyncio.to_thread(experiments_view, self._engine.folder))

    async def configuration(self, _: Request) -> Response:
        """The experiment's current configuration, without credentials."""
        return Json(serializers.configuration_view(self._engine.snapshot().config))

    async def _from_storage(self, look: Callable[[], Answer]) -> Answer:
        """Read from the storage that trials write to, which may be unavailable."""
        try:
            return await asyncio.wait_for(self._storage.call(look), STORAGE_TIMEOUT_S)
        except (asyncio.TimeoutError, OSError) as error:
            why = str(error) or f"no answer within {STORAGE_TIMEOUT_S:.0f} s"
            raise HTTPException(
                503, f"cannot read what the trial wrote: {why}; see to the shared storage, or try again"
            ) from error

    async def metrics(self, request: Request) -> Response:
        """The metric records of all trials."""
        return await self._pages(_is_final(request), lambda _: (0, _LAST_SEQUENCE_ID))

    async def metrics_of_trial(self, request: Request) -> Response:
        """The metric records of one trial."""
        is_final, trial_id = _is_final(request), self._trial_of(request).trial_id
        return await self._pages(is_final, lambda reader: reader.place_of(trial_id))

    async def metrics_in_range(self, request: Request) -> Response:
        """The metric records of the trials in this range of sequence numbers, both ends included."""
        first, last = _sequence_id(request, "first"), _sequence_id(request, "last")
        return await self._pages(None, lambda _: (first, last))

    async def latest_metrics(self, _: Request) -> Response:
        """All final results, and the newest intermediate result of each trial."""
        return await self._metrics(
            lambda reader: reader.metrics(is_final=True) + reader.latest_intermediates()
        )

    async def export(self, _: Request) -> Response:
        """Parameters and final results of the trials."""
        return Json(serializers.export_view(self._engine.snapshot().experiment.trials.values()))

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

    async def _metrics(self, read: Callable[[StoreReader], list[MetricRow]]) -> Response:
        return await self._read(lambda reader: [serializers.metric_view(row) for row in read(reader)])

    async def _read(self, read: Callable[[StoreReader], Any]) -> Response:
        def read_beside_the_engine() -> Response:
            with StoreReader(self._engine.folder.database) as reader:
                return Json(read(reader))

        return await asyncio.to_thread(read_beside_the_engine)

    def _trial_of(self, request: Request) -> Trial:
        trial_id = request.path_params["trial_id"]
        trial = self._engine.snapshot().experiment.trials.get(trial_id)
        if trial is None:
            raise HTTPException(
                404, f"cannot find trial {trial_id!r}; `nnictl trial ls` shows those there are"
            )
        return trial


def _whole_number(request: Request, name: str, least: int, most: int) -> int | None:
    """The value of a query parameter; None if it is missing."""
    text = request.query_params.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    # Checked before int(), which raises on thousands of digits.
    if digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS and least <= int(text) <= most:
        return int(text)
    raise HTTPException(
        400, f"cannot use {name}={text[:_MAX_DIGITS]}: write a number from {least} to {most}, in digits"
    )


def _since(request: Request) -> Cursor | None:
    return Cursor.read(request.query_params.get("since", ""))


def _streamed(request: Request, pieces: AsyncIterator[bytes], media_type: str) -> Response:
    told = {"Vary": "Accept-Encoding"}
    if takes_gzip(request.headers):
        pieces, told["Content-Encoding"] = packed(pieces), "gzip"
    return StreamingResponse(pieces, headers=told, media_type=media_type)


class _Follower(Response):
    """An event stream that decrements the follower count when it ends, for any reason."""

    def __init__(self, live: ChangeFeed, stream: Response) -> None:
        self._live, self._stream = live, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await self._stream(scope, receive, send)
        finally:
            self._live.followers -= 1


async def _body_of(request: Request) -> Any:
    """The JSON of a request. The middleware has checked its size."""
    try:
        document = json.loads(await request.body())
        # Reject what a response cannot encode: NaN, numbers beyond floats, lone surrogates.
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"cannot read what was sent: it is no JSON ({error}); fix it") from error
    return document


def _sequence_id(request: Request, name: str) -> int:
    text = request.path_params[name]
    # Checked before int(), which raises on thousands of digits; the database holds 18.
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise HTTPException(400, f"cannot use {text[:_MAX_DIGITS]!r} as a trial's number: write it in digits")
    return int(text)


def _is_final(request: Request) -> bool | None:
    match request.query_params.get("type"):
        case None:
            return None
        case "FINAL":
            return True
        case "PERIODICAL":
            return False
        case other:
            raise HTTPException(400, f"cannot use type={other}: write FINAL or PERIODICAL")


async def _refuse(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = error.detail if error.detail.startswith("cannot") else f"cannot do this: {error.detail}"
    return Json({"error": message}, status_code=error.status_code, headers=dict(error.headers or {}))


async def _refuse_mistake(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, status_code=400)


async def _refuse_in_this_state(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, status_code=409)


async def _refuse_for_now(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, status_code=503)


async def _refuse_change(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, status_code=403)
