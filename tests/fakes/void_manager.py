"""A manager process whose training service runs no jobs. A test simulates the keepers."""

import asyncio
import sys
from pathlib import Path

from void_service import Void

from nni_manager.config.model import ExperimentSpec
from nni_manager.engine.engine import Engine
from nni_manager.grpc_server.servicer import KeeperServer
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.tuner.registry import make_tuner


async def serve(folder: ExperimentFolder, port: int) -> None:
    """Serve until the process is killed."""
    with StoreReader(folder.database) as reader:
        config = ExperimentSpec.from_json(reader.experiment().config)
    engine = Engine(config, folder, Void, make_tuner)
    server = KeeperServer(engine.admission)
    await engine.restore()
    await server.start("127.0.0.1", port)
    await engine.start((f"127.0.0.1:{port}",))
    print("ready", flush=True)
    await engine.runtime.failed.wait()


if __name__ == "__main__":
    asyncio.run(serve(ExperimentFolder(Path(sys.argv[1])), int(sys.argv[2])))
