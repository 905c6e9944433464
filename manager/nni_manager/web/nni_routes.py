"""Paths of NNI's REST API that answer with exactly NNI's fields: its client refuses others.

`experiment_routes` has the paths whose answers NNI's client reads by key. Source: the REST API of NNI's manager v2.10 and v3.0,
and their Python client, nni.experiment.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from itertools import count
from typing import Any, BinaryIO

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from nni_manager.client import preflight, tensorboards
from nni_manager.client.tensorboards import TensorBoard
from nni_manager.engine import nni_views
from nni_manager.engine.listing import experiments_view
from nni_manager.engine.profiles import metadata_view
from nni_manager.engine.trial_logs import log_location, output_location
from nni_manager.web.backend_reads import BackendReads
from nni_manager.web.json_encoding import Json, body_of
from nni_manager.web.openapi import MANY, MAPPING, ONE, Operation
from nni_manager.web.query_values import STATUSES, nni_status
from trial_keeper.wire.messages import Stream

# NNI serves these files, and no others.
_LOGS = {"trial.log": Stream.KEEPER, "stdout": Stream.STDOUT, "stderr": Stream.STDERR}
_MODEL = "model.onnx"
_BLOCK_BYTES = 256 * 1024


class NniRoutes:
    """Queries in NNI's own form, and TensorBoard. `port` and `url_prefix`: those of this API."""

    def __init__(self, reads: BackendReads, port: int, url_prefix: str) -> None:
        self._reads = reads
        self._engine = reads.engine
        self._served = {"port": port, "pid": os.getpid(), "prefixUrl": url_prefix or None}

    def operations(self) -> list[Operation]:
        """All operations."""
        status = {"status": {"type": "string", "enum": STATUSES}}
        board = "/tensorboard/{board_id}"
        return [
            Operation("/trial-jobs", self.trial_jobs, MANY, query=status),
            Operation("/trial-jobs/{trial_id}", self.trial_job, ONE, refusals=(404,)),
            Operation("/experiment-metadata", self.metadata, ONE),
            Operation("/experiments-info", self.experiments_info, MANY),
            Operation("/trial-file/{trial_id}/{file_name}", self.trial_file, None, refusals=(404,)),
            Operation("/experiment", self.start_experiment, ONE, "POST", refusals=(409,)),
            Operation("/experiment/cluster-metadata", self.configure_cluster, ONE, "PUT", refusals=(409,)),
            Operation("/tensorboard-tasks", self.tensorboard_tasks, MANY),
            Operation("/tensorboard-tasks", self.stop_tensorboard_tasks, ONE, "DELETE"),
            Operation("/tensorboard", self.start_tensorboard, ONE, "POST", body=MAPPING),
            Operation(board, self.tensorboard_task, ONE, refusals=(404,)),
            Operation(board, self.update_tensorboard_task, ONE, "PUT", refusals=(404,)),
            Operation(board, self.stop_tensorboard_task, ONE, "DELETE", refusals=(404,)),
        ]

    # ---- trials

    async def trial_jobs(self, request: Request) -> Response:
        """All trials in NNI's form, or those with one status. /trials has more fields."""
        status = nni_status(request)
        snapshot, workspace = self._engine.snapshot(), self._engine.folder.workspace
        trials = [
            trial for trial in snapshot.experiment.trials.values() if status in (None, trial.state.nni_status)
        ]
        return await self._reads.from_store(
            lambda reader: Json(
                nni_views.trial_jobs_view(snapshot, trials, nni_views.reports_of(reader, workspace))
            )
        )

    async def trial_job(self, request: Request) -> Response:
        """One trial in NNI's form. /trials has more fields."""
        trial, snapshot = self._reads.trial_of(request), self._engine.snapshot()
        workspace = self._engine.folder.workspace
        return await self._reads.from_store(
            lambda reader: Json(
                nni_views.trial_job_view(snapshot, trial, nni_views.reports_of(reader, workspace, trial))
            )
        )

    async def trial_file(self, request: Request) -> Response:
        """A file of a trial's newest attempt: trial.log (of its keeper), stdout, stderr or model.onnx."""
        trial, name = self._reads.trial_of(request), request.path_params["file_name"]
        folder = self._engine.folder

        def open_file() -> BinaryIO:
            if name == _MODEL:
                location = output_location(folder, trial.trial_id, name)
            elif name in _LOGS:
                location = log_location(folder, trial.trial_id, _LOGS[name])
            else:
                names = ", ".join((*_LOGS, _MODEL))
                raise HTTPException(404, f"cannot send {name[:100]!r} of a trial; its files are {names}")
            with contextlib.suppress(FileNotFoundError):
                if location is not None:
                    return open(location.open(), "rb")
            raise HTTPException(
                404,
                f"cannot find {name} of trial {trial.trial_id}: it has not written this file; try again later",
            )

        file = await self._reads.from_storage(open_file)
        kind = "application/octet-stream" if name == _MODEL else "text/plain; charset=utf-8"
        return StreamingResponse(_content(file, name), media_type=kind)

    # ---- experiments

    async def metadata(self, request: Request) -> Response:
        """The experiment as an item of NNI's list of experiments."""
        url, shown = str(request.base_url).rstrip("/"), metadata_view(self._engine.snapshot())
        return Json(shown | self._served | {"webuiUrl": [url], "tag": shown["tags"]})

    async def experiments_info(self, _: Request) -> Response:
        """All experiments of the manager's user, in NNI's form."""
        lines = await asyncio.to_thread(experiments_view, self._engine.folder)
        unknown = {"startTime": "N/A", "endTime": "N/A"}
        return Json([unknown | line for line in lines])

    async def start_experiment(self, _: Request) -> Response:
        """Refused: the manager starts its experiment itself."""
        raise HTTPException(
            409,
            "cannot start an experiment with this request: a manager has one experiment, which it has started; use "
            "`nnictl create` for another, and `nnictl resume` for a stopped one",
        )

    async def configure_cluster(self, _: Request) -> Response:
        """Refused: the experiment file has the settings of the cluster."""
        raise HTTPException(
            409,
            "cannot change the cluster of a started experiment; write its settings into the experiment file, and use "
            "`nnictl create`",
        )

    # ---- TensorBoard

    async def tensorboard_tasks(self, _: Request) -> Response:
        """The TensorBoards of this experiment that were started and not stopped."""
        return Json([_board_view(board) for board in await asyncio.to_thread(self._boards)])

    async def tensorboard_task(self, request: Request) -> Response:
        """One TensorBoard."""
        return Json(_board_view(await self._board_of(request)))

    async def update_tensorboard_task(self, request: Request) -> Response:
        """One TensorBoard. It reads the trials' own files, so there is nothing to update."""
        return Json(_board_view(await self._board_of(request)))

    async def start_tensorboard(self, request: Request) -> Response:
        """Start TensorBoard on the logs of trials; `trials` has their ids, separated by commas."""
        given = await body_of(request)
        trials = given.get("trials") if isinstance(given, dict) else None
        known = self._engine.snapshot().experiment.trials
        ids = trials.split(",") if isinstance(trials, str) else []
        if not ids or not known.keys() >= {*ids}:
            raise HTTPException(
                400,
                'cannot start TensorBoard: "trials" must have ids of this experiment, separated by commas; send e.g. '
                '{"trials": "aB3dE,xY9zW"}',
            )

        def start() -> dict[str, Any]:
            folders = tensorboards.log_folders(self._engine.folder, ids)
            ports = (port for port in count(tensorboards.PORT) if preflight.is_free(port, tensorboards.HOST))
            _, board = tensorboards.start(self._engine.folder, ids, folders, next(ports))
            if board is None:
                log = tensorboards.log_of(self._engine.folder)
                raise HTTPException(503, f"cannot start TensorBoard: it has exited at once; see {log}")
            return _board_view(board)

        return Json(await self._reads.from_storage(start))

    async def stop_tensorboard_task(self, request: Request) -> Response:
        """Stop one TensorBoard."""
        board = await self._board_of(request)
        await asyncio.to_thread(board.stop)
        return Json(_board_view(board) | {"status": "STOPPED"})

    async def stop_tensorboard_tasks(self, _: Request) -> Response:
        """Stop every TensorBoard of this experiment."""
        for board in await asyncio.to_thread(self._boards):
            await asyncio.to_thread(board.stop)
        return Json({})

    def _boards(self) -> list[TensorBoard]:
        return tensorboards.started(self._engine.folder)

    async def _board_of(self, request: Request) -> TensorBoard:
        board_id = request.path_params["board_id"]
        boards = await asyncio.to_thread(self._boards)
        found = next((each for each in boards if str(each.process.pid) == board_id), None)
        if found is None:
            raise HTTPException(
                404, f"cannot find TensorBoard {board_id[:100]!r}; /tensorboard-tasks lists those that run"
            )
        return found


def _content(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The file's content up to its present end; of an empty file, the sentence that NNI sends."""
    with file:
        left = os.fstat(file.fileno()).st_size
        if left == 0:
            yield f"{name} is empty.".encode()
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            left -= len(block)
            yield block


def _board_view(board: TensorBoard) -> dict[str, Any]:
    """A TensorBoard in NNI's form."""
    return {
        "id": str(board.process.pid),
        "status": "RUNNING" if board.process.is_alive else "ERROR",
        "trialJobIdList": list(board.trials),
        "trialLogDirectoryList": list(board.folders),
        "pid": board.process.pid,
        "port": str(board.port),
    }
