"""The clients of all machines of an experiment, for the service and for threads that need files of keepers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from nni_manager.errors import NniManagerError
from nni_manager.training_services.remote.client import MachineClient
from nni_manager.training_services.remote.render import folder_of, key_of
from nni_manager.training_services.remote.section import RemoteMachine
from nni_manager.training_services.share import Share, StorageUnavailable
from nni_manager.training_services.ssh.ssh_thread import SshThread
from trial_keeper.wire.workspace import Workspace


class MachinePool:
    """The machines by key. Connects at once, and again."""

    def __init__(
        self,
        machines: Sequence[RemoteMachine],
        workspace: Workspace,
        on_event: Callable[[MachineClient, dict[str, Any]], None] = lambda client, event: None,
        on_up: Callable[[MachineClient], Awaitable[None]] | None = None,
    ) -> None:
        """See `MachineClient`. The callbacks run on the thread of the connections."""
        self.thread = SshThread()
        self.workspace = workspace
        self.clients = {key_of(each): MachineClient(each, workspace, on_event, on_up) for each in machines}
        self.machines_of_trials: dict[str, set[str]] = {}
        """The machines that have files of a trial, as far as known."""
        self.machine_of_trial: dict[str, str] = {}
        """The machine of a trial's latest job, if this manager has started the job."""
        self._connecting = [
            asyncio.run_coroutine_threadsafe(client.keep_connected(), self.thread.loop)
            for client in self.clients.values()
        ]

    def close(self) -> None:
        """End the connections. Jobs continue. Idempotent."""
        for connecting in self._connecting:
            connecting.cancel()
        self.thread.close()

    def note_trial(self, trial_id: str, key: str) -> None:
        """Record that a trial runs on a machine."""
        self.machine_of_trial[trial_id] = key
        self.note_files(trial_id, key)

    def note_files(self, trial_id: str, key: str) -> None:
        """Record that a machine has files of a trial. Thread-safe."""
        self.machines_of_trials.setdefault(trial_id, set()).add(key)


class RemoteShare(Share):
    """The experiment's folders on its machines: written to those that need a file, read from those that have it.

    Files of a trial go to its machine at once. All other files go to each machine, at the latest once it answers, and so do those
    of a trial to the machines where it ran before.

    A manager that resumes does not wait for a machine that is away: it takes files there for absent, and the jobs for running.
    `owns_pool`: for a program that reads files, and closes the connections with the share; it reports such a machine.
    """

    def __init__(self, pool: MachinePool, *, owns_pool: bool = False) -> None:
        self.pool, self._owns_pool = pool, owns_pool

    def close(self) -> None:
        """End the connections, unless they are the service's."""
        if self._owns_pool:
            self.pool.close()

    def send(self, path: Path, *, is_fixed: bool = False) -> None:
        """See `Share`."""
        clients = self.pool.clients.values()
        trial_id = self._trial_of(path)
        known = self.pool.machines_of_trials.get(trial_id, set())
        current = self.pool.machine_of_trial.get(trial_id)

        async def send_all() -> None:
            if known:
                await asyncio.gather(
                    *(
                        client.send(path) if current in (None, client.key) else client.send_later(path)
                        for client in clients
                        if client.key in known
                    )
                )
            else:
                await asyncio.gather(*(client.send_later(path, is_fixed=is_fixed) for client in clients))

        try:
            self.pool.thread.run(send_all())
        except NniManagerError as error:
            raise StorageUnavailable(str(error)) from error

    def read(self, path: Path, offset: int, longest: int) -> bytes:
        """See `Share`."""
        name = self._name(path)

        async def read_from(client: MachineClient) -> bytes:
            return (await client.request("read", path=name, offset=offset, longest=longest)).body

        return self._first(path, read_from) or b""

    def folders_in(self, path: Path) -> list[str]:
        """See `Share`."""
        name = self._name(path)
        found: dict[str, None] = {}

        async def list_folders(client: MachineClient) -> None:
            names = (await client.request("folders", path=name)).header["names"]
            if names:
                found.update(dict.fromkeys(names))
                if trial_id := self._trial_of(path):
                    self.pool.note_files(trial_id, client.key)

        self._first(path, list_folders)
        return list(found)

    def remove(self, path: Path) -> None:
        """See `Share`. Removes the whole experiment."""

        async def remove_from(client: MachineClient) -> str:
            try:
                await client.request("remove", key=client.key, experiment_id=path.name)
            except NniManagerError as error:
                remedy = f"'rm -rf {folder_of(client.machine, path.name)}'"
                return f"{error}; remove what is left with `{client.machine.command(remedy)}`"
            return ""

        async def remove_all() -> list[str]:
            return await asyncio.gather(*map(remove_from, self.pool.clients.values()))

        if problems := list(filter(None, self.pool.thread.run(remove_all()))):
            raise StorageUnavailable("\n".join(problems))

    # ---- inside

    def _name(self, path: Path) -> str:
        return path.relative_to(self.pool.workspace.root).as_posix()

    def _trial_of(self, path: Path) -> str:
        parts = path.relative_to(self.pool.workspace.root).parts
        return parts[1] if len(parts) > 1 and parts[0] == self.pool.workspace.trials.name else ""

    def _first(self, path: Path, ask: Callable[[MachineClient], Awaitable[Any]]) -> Any:
        """The first answer of machines that may have the path that is not empty.

        Raises:
            StorageUnavailable: there is none, and a machine did not answer.
        """
        known = self.pool.machines_of_trials.get(self._trial_of(path), set())
        clients = [client for client in self.pool.clients.values() if not known or client.key in known]

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*map(ask, clients), return_exceptions=True)

        answers = self.pool.thread.run(ask_all())
        if found := next((each for each in answers if each and not isinstance(each, BaseException)), None):
            return found
        for client, error in zip(clients, answers, strict=True):
            if isinstance(error, NniManagerError) and not self._owns_pool and not client.root:
                continue
            if isinstance(error, NniManagerError):
                raise StorageUnavailable(str(error)) from error
            if isinstance(error, BaseException):
                raise error
        return None
