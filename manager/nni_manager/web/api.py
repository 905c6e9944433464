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

from nni_manager.config.changes import UPDATE_TYPES
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine import views
from nni_manager.engine.changes import NotNow
from nni_manager.engine.importance import Importance, importance_of
from nni_manager.engine.listing import experiments_view
from nni_manager.engine.picture import Picture
from nni_manager.engine.storage_threads import StorageThreads
from nni_manager.engine.trial_logs import (
    LOGS,
    LONGEST_RANGE_BYTES,
    SHORTEST_RANGE_BYTES,
    attempts_of,
    read_range,
    sizes_of,
)
from nni_manager.engine.view import ViewOnly
from nni_manager.errors import TryAgain, UserMistake
from nni_manager.serving import Patience, note_endless
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.store import MetricRow, SeenJob, StoreReader
from nni_manager.web.entrance import CODE_S, SESSION_S, Entrance
from nni_manager.web.files import PLACES, Files
from nni_manager.web.gate import Gate
from nni_manager.web.json_text import to_json
from nni_manager.web.live import MOST_FOLLOWERS, Live, Version
from nni_manager.web.openapi import Operation, document
from nni_manager.web.packing import packed, takes_gzip
from trial_keeper import __version__

Answer = TypeVar("Answer")
API_ROOT = "/api/v1/nni"
# A search space, or ten thousand results with a few hundred bytes of parameters each.
MOST_CHANGE_BYTES = 4 * 1024 * 1024
# A code, and what JSON needs around it. Everybody may send one.
MOST_CODE_BYTES = 1024
# Of those that the cluster began again and again.
MOST_ATTEMPTS = 100
MOST_ENDED_JOBS = 200
# A storage that is only slow has answered by then.
STORAGE_WITHIN_S = 10.0
_MOST_DIGITS = 18
_LAST_SEQUENCE_ID = 2**62


class Json(JSONResponse):
    """NaN and infinities become null: they are legal metrics and no legal JSON."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)


class Changing(Protocol):
    """See `engine.changes.Changes`."""

    async def update(self, update_type: str, params: Mapping[str, Any]) -> None:
        """Change one limit, or the search space."""

    async def import_data(self, raw: Any) -> dict[str, int]:
        """Let the tuner learn from results of elsewhere."""

    async def propose(self, parameters: Mapping[str, Any]) -> Trial:
        """A new trial with these parameters."""

    async def retry(self, trial: Trial) -> Trial:
        """A new trial with the parameters of one that is over and did not succeed."""


class Served(Protocol):
    """What the routes are over: the engine of an experiment, or a view of what is stored, which refuses every change."""

    folder: ExperimentFolder

    def picture(self) -> Picture:
        """The experiment at this moment."""

    def stop(self) -> None:
        """End the experiment."""

    def stop_trial(self, trial_id: str) -> None:
        """End one trial, which is known."""

    @property
    def changes(self) -> Changing:
        """What can be changed while it runs."""


class Api:
    """The routes. `end` makes the manager's process end once the experiment is over.

    `host` and `port`: where the server listens.
    """

    def __init__(
        self, engine: Served, host: str, port: int, entrance: Entrance, end: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._host = host
        self._port = port
        self._entrance = entrance
        self._end = end
        self._files = Files()
        self._live = Live(engine.picture)
        self._storage = StorageThreads()
        self._importance: tuple[tuple[str, int], Importance] | None = None
        """The last that was evaluated, and of what: the metric, and how many results."""
        self._importance_lock = asyncio.Lock()

    def operations(self) -> list[Operation]:
        """Everything that can be asked."""
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
                most_body_bytes=MOST_CODE_BYTES,
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
                most_body_bytes=MOST_CHANGE_BYTES,
            ),
            Operation("/experiment/imported-data", self.imported, many),
            Operation(
                "/experiment/import-data",
                self.import_data,
                one,
                method="POST",
                body=many,
                most_body_bytes=MOST_CHANGE_BYTES,
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
                        "minimum": SHORTEST_RANGE_BYTES,
                        "maximum": LONGEST_RANGE_BYTES,
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
                Middleware(Patience),
                Middleware(
                    Gate,
                    entrance=self._entrance,
                    host=self._host,
                    most_body_bytes=roomy,
                    is_public=self._is_public,
                    for_programs={("POST", f"{API_ROOT}/entrance")},
                ),
            ],
            exception_handlers={
                HTTPException: _refuse,
                UserMistake: _refuse_mistake,
                NotNow: _refuse_in_this_state,
                TryAgain: _refuse_for_now,
                ViewOnly: _refuse_change,
            },
        )

    def _is_public(self, method: str, path: str) -> bool:
        """The page itself, and where its code is traded for a session."""
        if (method, path) == ("POST", f"{API_ROOT}/session"):
            return True
        return method in ("GET", "HEAD") and (path == "/" or path in self._files)

    # ---- the page

    async def first_page(self, _: Request) -> Response:
        """Where who comes without an aim is sent."""
        return RedirectResponse("/oview")

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        path = request.url.path
        if path not in self._files:
            raise HTTPException(404, "cannot find this file of the page; reload the page")
        return await asyncio.to_thread(self._files.answer, path, request.headers)

    async def new_link(self, _: Request) -> Response:
        """A code that lets one browser in, once, by the page at /enter#CODE."""
        return Json({"code": self._entrance.new_code(), "expiresInS": CODE_S})

    async def begin_session(self, request: Request) -> Response:
        """Trade a code for a session: its cookie, and the key that comes with it in the header X-Trial-Keeper."""
        sent = await _body_of(request)
        code = sent.get("code") if isinstance(sent, dict) else None
        session = self._entrance.begin(code) if isinstance(code, str) else None
        if session is None:
            raise HTTPException(
                403,
                "cannot let you in by this link: it was used already, or is older than "
                f"{CODE_S // 60} minutes; `nnictl webui url` prints another",
            )
        answer = Json({"key": session.key})
        answer.set_cookie(
            self._entrance.cookie_name,
            session.cookie,
            max_age=SESSION_S,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        # Else a browser that saw a hundred experiments in a week would send more than is taken, and see none.
        for name in self._entrance.too_old(request.cookies):
            answer.delete_cookie(name, secure=request.url.scheme == "https", httponly=True, samesite="strict")
        return answer

    async def end_session(self, request: Request) -> Response:
        """Sign the page out that asks this; it needs another link to come back."""
        if cookie := request.cookies.get(self._entrance.cookie_name):
            self._entrance.end(cookie)
        answer = Json({})
        answer.delete_cookie(
            self._entrance.cookie_name,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    async def news(self, request: Request) -> Response:
        """The summary, and the trials that have changed since a version; all of them without one, or by another process's."""
        return _streamed(request, self._live.news(_since(request)), Json.media_type)

    async def events(self, request: Request) -> Response:
        """The same as server-sent events, from now on; at most two a second."""
        if self._live.followers >= MOST_FOLLOWERS:
            raise HTTPException(
                503,
                f"cannot tell you more as it comes: {MOST_FOLLOWERS} others are told already; ask for changes",
            )
        note_endless(request.scope)
        return _streamed(request, self._live.follow(_since(request)), "text/event-stream")

    # ---- the experiment

    async def description(self, _: Request) -> Response:
        """This description."""
        return Json(document(self.operations(), API_ROOT, self._entrance.cookie_name))

    async def version(self, _: Request) -> Response:
        """The manager's version."""
        return PlainTextResponse(__version__)

    async def check_status(self, _: Request) -> Response:
        """The experiment's state."""
        return Json(views.status_view(self._engine.picture()))

    async def summary(self, _: Request) -> Response:
        """The experiment at a glance."""
        return Json(views.summary_view(self._engine.picture()))

    async def experiment(self, _: Request) -> Response:
        """The experiment's profile."""
        return Json(views.profile_view(self._engine.picture()))

    async def stop_experiment(self, _: Request) -> Response:
        """Stop the experiment and end the manager; answers before that is done."""
        self._engine.stop()
        self._end()
        return Json({"status": self._engine.picture().experiment.state.value}, status_code=202)

    async def update(self, request: Request) -> Response:
        """Change a limit or the search space, durably: the one that update_type names, as params of a profile has it."""
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
        """Let the tuner learn from results of elsewhere, from all of them or, when one is wrong, from none."""
        changes = self._engine.changes
        return Json(await changes.import_data(await _body_of(request)))

    async def imported(self, _: Request) -> Response:
        """The results of elsewhere that the tuner was told."""
        return await self._read(lambda reader: views.imported_view(reader.imported()))

    async def propose(self, request: Request) -> Response:
        """Begin a trial with the parameters that are sent, whatever the tuner thinks and whichever limit is reached."""
        changes = self._engine.changes
        parameters = await _body_of(request)
        if not isinstance(parameters, dict):
            raise HTTPException(
                400, 'cannot begin a trial: its parameters are no mapping; send {"lr": 0.1}, say'
            )
        return self._begun(await changes.propose(parameters))

    async def retry(self, request: Request) -> Response:
        """Begin a trial with the parameters of one that is over and did not succeed; that one stays as it is."""
        changes = self._engine.changes
        return self._begun(await changes.retry(self._trial_of(request)))

    @staticmethod
    def _begun(trial: Trial) -> Response:
        return Json({"sequenceId": trial.sequence_id, "trialJobId": trial.trial_id})

    async def metadata(self, _: Request) -> Response:
        """What a list of experiments shows."""
        return Json(views.metadata_view(self._engine.picture()) | {"port": self._port})

    async def statistics(self, _: Request) -> Response:
        """Counts of trials by status; those there are none of are left out."""
        return Json(views.statistics_view(self._engine.picture().experiment))

    async def trials(self, request: Request) -> Response:
        """All trials, or those with one status."""
        status = request.query_params.get("status")
        picture = self._engine.picture()
        trials = picture.experiment.trials.values()
        return Json(
            [views.trial_view(picture, trial) for trial in trials if status in (None, trial.state.nni_status)]
        )

    async def trial(self, request: Request) -> Response:
        """One trial."""
        return Json(views.trial_view(self._engine.picture(), self._trial_of(request)))

    async def stop_trial(self, request: Request) -> Response:
        """Stop one trial; answers before it has ended."""
        trial = self._trial_of(request)
        if trial.state.is_final:
            raise HTTPException(409, f"cannot stop trial {trial.trial_id}: it is {trial.state.value} already")
        self._engine.stop_trial(trial.trial_id)
        return Json(views.trial_view(self._engine.picture(), trial), status_code=202)

    async def usage_of_trial(self, request: Request) -> Response:
        """What one trial used, sample by sample."""
        trial_id = self._trial_of(request).trial_id
        return await self._read(lambda reader: views.usage_samples_view(reader.usage_of(trial_id)))

    async def attempts_of_trial(self, request: Request) -> Response:
        """The attempts of one trial with their tasks, and the sizes of what each wrote."""
        trial_id, folder = self._trial_of(request).trial_id, self._engine.folder

        def look() -> Any:
            keys = attempts_of(folder, trial_id)[-MOST_ATTEMPTS:]
            return views.attempts_view({key: sizes_of(folder, key) for key in keys})

        return Json(await self._from_storage(look))

    async def log_of_trial(self, request: Request) -> Response:
        """A range of what one trial wrote, in its newest attempt or in one. `from` below 0 counts from the end."""
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
            first=_whole_number(request, "from", -(10**_MOST_DIGITS), 10**_MOST_DIGITS) or 0,
            most_bytes=_whole_number(request, "limit", SHORTEST_RANGE_BYTES, LONGEST_RANGE_BYTES)
            or LONGEST_RANGE_BYTES,
            attempt=_whole_number(request, "attempt", 0, 10**9),
            task=request.query_params.get("task"),
            is_whole=trial.state.is_final,
        )
        found = await self._from_storage(read)
        return Json(
            {"size": found.size_bytes, "from": found.first, "text": found.text, "next": found.following}
        )

    async def importance(self, request: Request) -> Response:
        """How much each hyper-parameter had to do with the best results; `why` says it when nobody can tell."""
        metric = request.query_params.get("metric") or "default"
        picture = self._engine.picture()
        results = [
            (trial.parameters, trial.final)
            for trial in picture.experiment.trials.values()
            if trial.state is TrialState.SUCCEEDED and trial.final is not None
        ]
        key = metric, len(results)
        async with self._importance_lock:  # of several who ask at once, one has it evaluated
            if self._importance is None or self._importance[0] != key:
                evaluate = partial(importance_of, results, metric, maximize=picture.experiment.maximize)
                self._importance = key, await asyncio.to_thread(evaluate)
        found = self._importance[1]
        shares = [{"name": name, "value": share} for name, share in found.shares.items()]
        return Json({"importances": shares, "trials": found.trials, "why": found.why})

    async def jobs(self, _: Request) -> Response:
        """The jobs that are not over, and the newest that are: their trials, and how each is heard."""
        stored = await asyncio.to_thread(self._stored_jobs)
        return Json(views.jobs_view(self._engine.picture(), stored))

    def _stored_jobs(self) -> list[SeenJob]:
        with StoreReader(self._engine.folder.database) as reader:
            return reader.newest_jobs(MOST_ENDED_JOBS)

    async def experiments(self, _: Request) -> Response:
        """All experiments of the user whose manager this is, with where each is served, if it is."""
        return Json(await asyncio.to_thread(experiments_view, self._engine.folder))

    async def configuration(self, _: Request) -> Response:
        """The experiment's configuration as it is now, without logins."""
        return Json(views.configuration_view(self._engine.picture().config))

    async def _from_storage(self, look: Callable[[], Answer]) -> Answer:
        """What lies on the storage that trials write to, which may be away."""
        try:
            return await asyncio.wait_for(self._storage.call(look), STORAGE_WITHIN_S)
        except (asyncio.TimeoutError, OSError) as error:
            why = str(error) or f"no answer within {STORAGE_WITHIN_S:.0f} s"
            raise HTTPException(
                503, f"cannot read what the trial wrote: {why}; see to the shared storage, or try again"
            ) from error

    async def metrics(self, request: Request) -> Response:
        """The records of all trials."""
        return await self._pages(_is_final(request), lambda _: (0, _LAST_SEQUENCE_ID))

    async def metrics_of_trial(self, request: Request) -> Response:
        """The records of one trial."""
        is_final, trial_id = _is_final(request), self._trial_of(request).trial_id
        return await self._pages(is_final, lambda reader: reader.place_of(trial_id))

    async def metrics_in_range(self, request: Request) -> Response:
        """The records of the trials with these sequence numbers, both included."""
        first, last = _sequence_id(request, "first"), _sequence_id(request, "last")
        return await self._pages(None, lambda _: (first, last))

    async def latest_metrics(self, _: Request) -> Response:
        """All final results, and the newest intermediate result of each trial."""
        return await self._metrics(
            lambda reader: reader.metrics(is_final=True) + reader.latest_intermediates()
        )

    async def export(self, _: Request) -> Response:
        """Parameters and results of the trials that succeeded."""
        return Json(views.export_view(self._engine.picture().experiment.trials.values()))

    async def _pages(
        self, is_final: bool | None, between: Callable[[StoreReader], tuple[int, int]]
    ) -> Response:
        """All records, page by page: they may be more than memory should hold, and the client slow."""

        def read() -> Iterator[bytes]:
            lead = b"["
            with StoreReader(self._engine.folder.database) as reader:
                for page in reader.metric_pages(is_final, *between(reader)):
                    yield lead + b",".join(to_json(views.metric_view(row)) for row in page)
                    lead = b","
            yield b"[]" if lead == b"[" else b"]"

        pages = read()
        # What cannot be read at all is told as an error.
        first = await asyncio.to_thread(next, pages)
        return StreamingResponse(chain((first,), pages), media_type=Json.media_type)

    async def _metrics(self, read: Callable[[StoreReader], list[MetricRow]]) -> Response:
        return await self._read(lambda reader: [views.metric_view(row) for row in read(reader)])

    async def _read(self, read: Callable[[StoreReader], Any]) -> Response:
        def read_beside_the_engine() -> Response:
            with StoreReader(self._engine.folder.database) as reader:
                return Json(read(reader))

        return await asyncio.to_thread(read_beside_the_engine)

    def _trial_of(self, request: Request) -> Trial:
        trial_id = request.path_params["trial_id"]
        trial = self._engine.picture().experiment.trials.get(trial_id)
        if trial is None:
            raise HTTPException(
                404, f"cannot find trial {trial_id!r}; `nnictl trial ls` shows those there are"
            )
        return trial


def _whole_number(request: Request, name: str, least: int, most: int) -> int | None:
    """What the query says; None: nothing."""
    text = request.query_params.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    # Not int() of anything, as above.
    if digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS and least <= int(text) <= most:
        return int(text)
    raise HTTPException(
        400, f"cannot use {name}={text[:_MOST_DIGITS]}: write a number from {least} to {most}, in digits"
    )


def _since(request: Request) -> Version | None:
    return Version.read(request.query_params.get("since", ""))


def _streamed(request: Request, pieces: AsyncIterator[bytes], media_type: str) -> Response:
    told = {"Vary": "Accept-Encoding"}
    if takes_gzip(request.headers):
        pieces, told["Content-Encoding"] = packed(pieces), "gzip"
    return StreamingResponse(pieces, headers=told, media_type=media_type)


async def _body_of(request: Request) -> Any:
    """The JSON of a request. The gate has seen that it is not too large."""
    try:
        document = json.loads(await request.body())
        # What cannot be said again in an answer: NaN, numbers beyond all floats, halves of characters.
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"cannot read what was sent: it is no JSON ({error}); mend it") from error
    return document


def _sequence_id(request: Request, name: str) -> int:
    text = request.path_params[name]
    # Not int() of anything: Python refuses to read thousands of digits, and the database holds 18.
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise HTTPException(
            400, f"cannot use {text[:_MOST_DIGITS]!r} as a trial's number: write it in digits"
        )
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
