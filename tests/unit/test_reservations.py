"""Jobs wait for room, which is free capacity on a machine, and receive it in order."""

import asyncio

import pytest

from nni_manager.training_services.reservations import NoRoom, ReservationQueue


class Room:
    """A number of free places, and the jobs that tried to take one."""

    def __init__(self, free=0):
        self.queue = ReservationQueue()
        self.free = free
        self.tried, self.has = [], []
        self.retry_s = None

    def reserve(self, job_id):
        async def take():
            self.tried.append(job_id)
            if not self.free:
                return NoRoom(f"{job_id} sees no room", self.retry_s)
            self.free -= 1
            self.has.append(job_id)
            return None

        return asyncio.ensure_future(self.queue.reserve(job_id, take))

    def add(self, places=1):
        self.free += places
        self.queue.note_freed()

    def reasons(self, *job_ids):
        return [self.queue.pending_reason(job_id) for job_id in job_ids]


async def settle():
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_job_gets_free_room_immediately():
    room = Room(free=1)
    await room.reserve("a")
    assert (room.has, room.reasons("a")) == (["a"], [""])


async def test_jobs_get_room_in_the_order_of_their_reservations():
    room = Room()
    jobs = [room.reserve(job_id) for job_id in "abc"]
    await settle()
    assert room.tried == ["a"]
    # The new job d makes its reservation before the waiting jobs can use the free room. It must not get this room before they do.
    room.add()
    jobs.append(room.reserve("d"))
    await settle()
    assert room.has == ["a"]
    room.add(3)
    await asyncio.gather(*jobs)
    assert room.has == ["a", "b", "c", "d"]


async def test_all_waiting_jobs_show_the_pending_reason_of_the_first_waiting_job():
    room = Room()
    jobs = [room.reserve(job_id) for job_id in "ab"]
    await settle()
    assert room.reasons("a", "b", "c") == ["a sees no room", "a sees no room", ""]
    room.add()
    await settle()
    assert room.reasons("a", "b") == ["", "b sees no room"]
    room.add()
    await asyncio.gather(*jobs)
    last = room.reserve("c")
    assert room.reasons("c") == [""]  # c has not tried yet, and does not show the reason of an earlier job
    await settle()
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    assert room.reasons("c") == [""]


@pytest.mark.parametrize("cancelled", ["a", "b"])
async def test_the_next_job_gets_the_room_if_a_waiting_job_is_cancelled(cancelled):
    room = Room()
    jobs = {job_id: room.reserve(job_id) for job_id in "abc"}
    await settle()
    jobs.pop(cancelled).cancel()
    await settle()
    assert room.reasons(cancelled) == [""]
    room.add(2)
    await asyncio.gather(*jobs.values())
    assert room.has == sorted(jobs)


async def test_room_that_becomes_free_during_a_reservation_attempt_is_used():
    room = Room()

    async def take():
        if room.free:
            return None
        room.add()
        return NoRoom("just freed", None)

    await room.queue.reserve("a", take)


async def test_a_failed_reservation_attempt_is_repeated_after_a_delay():
    room = Room()
    room.retry_s = 0.01
    waits = room.reserve("a")
    await settle()
    room.free = 1  # room becomes free, but the queue is not notified
    await waits
    assert room.has == ["a"]
