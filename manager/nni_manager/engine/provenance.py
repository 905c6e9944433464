"""Records what ran: the version of the code, and the environment of each attempt. Each list of packages is stored once."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.provenance import CodeVersion
from nni_manager.engine.code_version import code_version
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.shared_files import STORAGE_LAG_S
from nni_manager.errors import RetryableError
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import code_row, environment_row, packages_row
from trial_keeper.wire.messages import NO_ENVIRONMENT, AttemptKey, Environment
from trial_keeper.wire.workspace import Workspace

log = logging.getLogger(__name__)


class ProvenanceRecorder:
    """Writes provenance to the store of one experiment."""

    def __init__(
        self, runtime: Runtime, reader: StoreReader, read_packages: Callable[[str], Awaitable[bytes]]
    ) -> None:
        """`read_packages` reads a list of packages in the workspace by its digest."""
        self._runtime = runtime
        self._read = read_packages
        self.code: tuple[CodeVersion, ...] = tuple(reader.code())
        self._packages = set(reader.package_digests())
        """The lists that are stored, or being read."""
        self._noted: dict[AttemptKey, Environment] = {}

    async def record_code(self, config: ExperimentSpec, workspace: Workspace) -> None:
        """Record the version of the code folder, if it differs from the last one."""
        code_dir, secret_files = config.code_dir, config.secret_files
        now = await asyncio.to_thread(code_version, code_dir, workspace.root, time.time(), secret_files)
        if not self.code or not self.code[-1].is_same(now):
            self.code = (*self.code, now)
            self._runtime.save(code_row(now))

    def note(self, key: AttemptKey, environment: Environment) -> None:
        """Record the environment of a registered attempt."""
        if environment in (NO_ENVIRONMENT, self._noted.get(key)):
            return
        self._noted[key] = environment
        self._runtime.save(environment_row(key, environment))
        if environment.packages and environment.packages not in self._packages:
            self._packages.add(environment.packages)
            self._runtime.spawn(self._store_packages(environment.packages))

    def forget(self, key: AttemptKey) -> None:
        """Free the memory of a closed attempt."""
        self._noted.pop(key, None)

    async def _store_packages(self, digest: str) -> None:
        # Another machine's file may not be visible yet.
        for delay_s in (0.0, STORAGE_LAG_S):
            await asyncio.sleep(delay_s)
            with contextlib.suppress(OSError, RetryableError):
                content = await self._read(digest)
                if hashlib.sha256(content).hexdigest() == digest:
                    text = content.decode(errors="replace").replace("\0", "")
                    self._runtime.save(packages_row(digest, text))
                    return
        log.info("packages %s: their list is not in the workspace", digest)
        self._packages.discard(digest)
