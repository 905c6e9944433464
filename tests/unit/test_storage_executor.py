"""Threads for calls to a storage: a call that hangs does not delay other calls."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

from nni_manager.engine import storage_executor
from nni_manager.engine.storage_executor import THREADS, StorageExecutor

HANGS_AT_THE_END = """
import asyncio, sys
from nni_manager.engine.storage_executor import StorageExecutor
async def main():
    threads = StorageExecutor()
    hanging = asyncio.ensure_future(threads.call(open, sys.argv[1]))
    assert await threads.call(len, "abc") == 3
    threads.close()
asyncio.run(main())
print("over")
"""


def test_a_storage_call_returns_the_result_or_raises_the_exception_of_its_function() -> None:
    async def scenario() -> None:
        threads = StorageExecutor()
        assert await threads.call(sorted, [2, 1], reverse=True) == [2, 1]
        with pytest.raises(FileNotFoundError):
            await threads.call(open, "/there/is/no/such/file")
        threads.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_hanging_storage_call_is_reported_and_does_not_block_other_storage_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def scenario() -> None:
        threads = StorageExecutor()
        hanging = [asyncio.ensure_future(threads.call(open, pipe)) for _ in range(THREADS - 1)]
        for number in range(100):
            assert await threads.call(int, str(number)) == number
        assert threads.stalled_s() == 0, "it may only be slow"
        monkeypatch.setattr(storage_executor, "STALL_TIMEOUT_S", 0.0)
        assert threads.stalled_s() > 0
        # The hanging calls wait for a writer of the pipe. Opening the pipe for writing ends them, as if the storage responded
        # again.
        with open(pipe, "w"):
            for file in await asyncio.gather(*hanging):
                file.close()
        assert await threads.call(int, "7") == 7
        threads.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_cancelled_storage_call_frees_its_thread_when_the_storage_responds(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def scenario() -> None:
        threads = StorageExecutor()
        hanging = asyncio.ensure_future(threads.call(pipe.read_bytes))
        await threads.call(int, "1")
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        os.close(os.open(pipe, os.O_WRONLY))
        assert [await threads.call(int, "2") for _ in range(THREADS * 2)] == [2] * THREADS * 2
        threads.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_process_can_exit_while_the_storage_hangs(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = subprocess.run(
        [sys.executable, "-c", HANGS_AT_THE_END, pipe], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
