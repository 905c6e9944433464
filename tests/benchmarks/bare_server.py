"""A minimal manager: a bare gRPC server that stores received records in SQLite.

Usage: `bare_server.py DATABASE`. It accepts every client, and parses the JSON of a record without further checks. It keeps no
state except the rows. One transaction commits all rows that are waiting, with the same durability as in the manager. The server
prints its port.
"""

import asyncio
import json
import sqlite3
import sys

import grpc.aio

from trial_keeper.wire.v1 import keeper_pb2 as pb
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceServicer, add_KeeperServiceServicer_to_server

HEADER_BYTES = 8


class BareServer(KeeperServiceServicer):
    def __init__(self, database):
        self._connection = sqlite3.connect(database, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE metric (trial_id TEXT, record_offset INTEGER, value TEXT)")
        self._rows = []
        self._has_rows = asyncio.Event()
        self._committed = asyncio.Event()

    async def Connect(self, requests, context):  # noqa: N802 - the name is the protocol's
        received, torn = 0, b""
        async for request in requests:
            if request.WhichOneof("message") == "hello":
                await context.write(pb.ConnectResponse(welcome=pb.Welcome()))
            if request.WhichOneof("message") != "chunk":
                continue
            chunk = request.chunk
            *lines, torn = (torn + chunk.data).split(b"\n")
            for line in lines:
                self._rows.append((chunk.key.trial_id, received, json.loads(line[HEADER_BYTES:])["value"]))
                received += len(line) + 1
            self._has_rows.set()
            await self._committed.wait()
            offset = pb.StreamOffset(stream=chunk.stream, offset=received)
            attempt = pb.AttemptOffsets(key=chunk.key, offsets=[offset])
            await context.write(pb.ConnectResponse(ack=pb.Ack(attempt=attempt)))

    async def commit(self):
        while True:
            await self._has_rows.wait()
            # All rows that have arrived so far go into the transaction below. The event is cleared first, so that only a later
            # row sets it again.
            self._has_rows.clear()
            rows, self._rows = self._rows, []
            self._connection.execute("BEGIN")
            self._connection.executemany("INSERT INTO metric VALUES (?, ?, ?)", rows)
            self._connection.execute("COMMIT")
            self._committed.set()
            self._committed.clear()


async def serve(database):
    # The manager has the same setting. Keepers ping more often than gRPC permits by default. Without this setting, gRPC would
    # close their connections with "too_many_pings".
    server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])
    servicer = BareServer(database)
    add_KeeperServiceServicer_to_server(servicer, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await servicer.commit()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
