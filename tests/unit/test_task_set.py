"""Asyncio tasks that are referenced until they end, and cancelled together."""

import asyncio
from collections.abc import Awaitable, Callable

from deadlines import DEADLINE_S

from nni_manager.support.task_set import TaskSet


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_failed_task_is_reported_and_removed_from_the_set() -> None:
    failures: list[BaseException] = []

    async def fail() -> None:
        raise ValueError("broken")

    async def scenario() -> None:
        tasks = TaskSet(failures.append)
        tasks.spawn(fail())
        assert len(tasks) == 1
        await tasks.join()
        assert len(tasks) == 0

    play(scenario)
    assert [str(error) for error in failures] == ["broken"]


def test_cancelling_a_set_cancels_its_tasks_and_all_tasks_spawned_later() -> None:
    failures: list[BaseException] = []
    steps: list[str] = []

    async def scenario() -> None:
        tasks, never = TaskSet(failures.append), asyncio.Event()

        async def late() -> None:
            await asyncio.sleep(0)
            steps.append("the late task runs")

        async def hang() -> None:
            try:
                await never.wait()
            finally:
                steps.append("cancelled")
                tasks.spawn(late())

        tasks.spawn(hang())
        await asyncio.sleep(0)
        await tasks.cancel()
        assert len(tasks) == 0

    play(scenario)
    assert (steps, failures) == (["cancelled"], [])


def test_join_also_waits_for_tasks_that_a_joined_task_starts() -> None:
    steps: list[str] = []

    async def scenario() -> None:
        tasks = TaskSet()

        async def second() -> None:
            # The second task ends after the first, so join() must also wait for a task that another task has started.
            for _ in range(5):
                await asyncio.sleep(0)
            steps.append("second")

        async def first() -> None:
            steps.append("first")
            tasks.spawn(second())

        tasks.spawn(first())
        await tasks.join()

    play(scenario)
    assert steps == ["first", "second"]
