"""Readable attempt ids for tests: number 0 starts before number 1."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from nni_manager.domain.ingest import StreamWrite
from nni_manager.engine.tokens import token_of
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import MetricRow, Stored, UsageRow, Write, attempt_row
from nni_manager.store.writer import Store
from trial_keeper.wire.attempt_ids import start_ms_of
from trial_keeper.wire.documents import AttemptDocument
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.workspace import AttemptFolder, Workspace


def attempt_id(number: int) -> str:
    """A valid id; ids of larger numbers sort later."""
    return f"{number:026d}"


def metrics_of(reader: StoreReader, trial_id: str) -> list[MetricRow]:
    """The metric records from the attempts that determine a trial's result, in the order in which they were written."""
    return list(chain.from_iterable(reader.metric_pages(None, *reader.sequence_ids_of(trial_id))))


def _is_spelled(key: AttemptKey) -> bool:
    # The readable ids of tests have the start time 0, in the year 1970. Real ids have a later start time.
    return key.attempt_id.isdecimal() or start_ms_of(key.attempt_id) == 0


class AttemptNumbers:
    """Maps readable ids to the generated ids of keepers: number n is the n-th attempt of its task."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._known: dict[tuple[str, str], list[str]] = {}

    def spelled(self, key: AttemptKey) -> AttemptKey:
        """The readable key of an attempt with a generated id."""
        if _is_spelled(key):
            return key
        known = self._look(key)
        if key.attempt_id not in known:
            known.append(key.attempt_id)  # an attempt is unknown if the keeper could not create its folder
        return replace(key, attempt_id=attempt_id(known.index(key.attempt_id)))

    def real(self, key: AttemptKey) -> AttemptKey:
        """The key with the generated id of an attempt. If the keeper has not created the attempt yet, the readable key is
        returned.
        """
        if not _is_spelled(key) or self._workspace.attempt(key).path.exists():
            return key
        known, number = self._look(key), int(key.attempt_id)
        return replace(key, attempt_id=known[number]) if number < len(known) else key

    def folder(self, key: AttemptKey) -> AttemptFolder:
        """The folder of an attempt."""
        return self._workspace.attempt(self.real(key))

    def keys(self, trial_id: str) -> list[AttemptKey]:
        """The readable keys of the attempts that have created a folder, in the order of their starts."""
        return [self.spelled(key) for key in self._workspace.attempts_of(trial_id)]

    def _look(self, key: AttemptKey) -> list[str]:
        known = self._known.setdefault((key.trial_id, key.task), [])
        try:
            found = self._workspace.attempts_of(key.trial_id)
        except NotADirectoryError:  # a test has replaced the folder with a file
            found = []
        for each in found:
            if each.task == key.task and not _is_spelled(each) and each.attempt_id not in known:
                known.append(each.attempt_id)
        return known


class RegisteringStore(Store):
    """A store that registers the attempts of its writes. The manager registers attempts before it writes."""

    def commit(self, writes: Sequence[Write], now_s: float) -> Stored:
        """Registers each attempt under the number in its readable id, and stores the writes."""
        keys = {write.key for write in writes if isinstance(write, StreamWrite)}
        keys |= {write.usage.key for write in writes if isinstance(write, UsageRow)}
        rows = [attempt_row(key, int(key.attempt_id)) for key in sorted(keys, key=str)]
        return super().commit([*rows, *writes], now_s)


def sign_attempt(folder: ExperimentFolder, key: AttemptKey, job_id: str | None = None) -> str:
    """Create the folder of an attempt as the job's keeper would; return the job's token. If `job_id` is None, the trial has its
    own job.
    """
    job_id = job_id or key.trial_id
    with StoreReader(folder.database) as reader:
        token = token_of(reader.experiment().secret, job_id)
    attempt = folder.workspace.attempt(key)
    attempt.path.mkdir(parents=True, exist_ok=True)
    document = AttemptDocument(folder.experiment_id, job_id, key, 1.0)
    attempt.attempt_json.write_bytes(document.to_bytes(token))
    return token
