"""The connection to a remote machine hangs. Nevertheless, each job is started only once, and its end is reported once."""

import asyncio
import os
import signal

import pytest
from deadlines import DEADLINE_S
from platforms import a_platform
from real_experiment import until

from nni_manager.errors import RetryableError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.remote import service as remote_service
from nni_manager.training_services.remote.connection import RequestFailed
from nni_manager.training_services.remote.service import RemoteService
from nni_manager.training_services.ssh import client
from trial_keeper.wire.reasons import ExitReason

EXITS_AS_WRITTEN = """\
STARTED
echo >> "$TRIAL_KEEPER_WORKSPACE/starts"
while [ ! -s "$TRIAL_KEEPER_WORKSPACE/code" ]; do sleep 0.02; done
exit "$(cat "$TRIAL_KEEPER_WORKSPACE/code")"
"""


@pytest.fixture
def platform(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_KEEP_ALIVE_S", 0.3)
    with a_platform("remote", tmp_path, monkeypatch) as platform:
        platform.runs(EXITS_AS_WRITTEN)
        yield platform


async def submit_again(service, settings):
    """Repeat the submission of a job until the machine responds."""
    while True:
        try:
            await service.submit(settings)
        except RetryableError:
            await asyncio.sleep(0.05)
        else:
            return


def thaw(pids):
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def test_a_hanging_connection_to_a_machine_is_replaced_and_the_job_continues(platform):
    async with platform.manager() as service:
        await service.submit(platform.settings())
        await platform.has_started()
        frozen = platform.machine.freeze()
        await until(lambda: service.problem, "the connection is given up", DEADLINE_S)
        assert "its machine is away, where it continues" in service.warning("trial1")
        await until(lambda: not service.problem, "there is another one", DEADLINE_S)
        assert service.warning("trial1") == ""
        thaw(frozen)
        platform.file("code").write_text("5")
        assert (await platform.has_ended()).exit_code == 5
        await platform.is_clean()
    assert len(platform.ends) == 1


async def test_the_job_states_of_a_machine_are_requested_again_after_the_machine_failed_to_read_them(
    platform, monkeypatch
):
    monkeypatch.setattr(remote_service, "_RETRY_S", 0.05)
    async with platform.manager() as service:
        await service.submit(platform.settings())
        await platform.has_started()
        states, failures = RemoteService._states, [RequestFailed("too many open files")] * 2

        async def fail_twice(service, request):
            found = await states(service, request)
            if failures:
                raise failures.pop()
            return found

        monkeypatch.setattr(RemoteService, "_states", fail_twice)
        assert await service.stop("trial1")
        await platform.has_ended()
        assert failures == []
        await platform.is_clean()
    assert len(platform.ends) == 1


async def test_a_repeated_start_request_goes_to_the_same_machine_and_starts_the_job_only_once(
    platform,
):
    async with platform.manager() as service:
        await service.reserve("trial1")
        frozen = platform.machine.freeze()
        with pytest.raises(RetryableError, match="cannot reach"):
            await service.submit(platform.settings())
        service.release("trial1")
        thaw(frozen)  # the machine continues and may receive the first request only now
        await service.reserve("trial1")
        await asyncio.wait_for(submit_again(service, platform.settings()), DEADLINE_S)
        await platform.has_started()
        platform.file("code").write_text("0")
        await platform.has_ended()
        assert platform.file("starts").read_text() == "\n"
    assert len(platform.ends) == 1


async def test_a_job_can_be_stopped_after_its_start_request_received_no_response(platform):
    async with platform.manager() as service:
        await service.reserve("trial1")
        platform.machine.freeze()
        with pytest.raises(RetryableError):
            await service.submit(platform.settings())
        assert await service.stop("trial1")
        end = await platform.has_ended()
        assert "was stopped before it was created" in end.message
        await platform.is_clean()
    assert len(platform.ends) == 1


async def test_the_end_message_of_a_job_names_the_machine_restart_that_happened_while_no_manager_ran(
    platform,
):
    async with platform.manager() as first:
        await first.submit(platform.settings())
        await platform.has_started()
        first.on_job_ended = lambda ended: None
    platform.file("code").write_text("0")
    await until(lambda: platform.is_terminal("trial1"), "the job ends without a manager", DEADLINE_S)
    (record,) = platform.machine.home.rglob("trial1.json")
    record.write_bytes(b"")  # a power failure can leave an empty file
    async with platform.manager() as second:
        assert await second.adopt("trial1") is JobPresence.ENDED
        second.report_end("trial1", stop_was_asked=False)
    (end,) = platform.ends
    assert (end.exit_code, end.reason, end.is_explained) == (None, ExitReason.JOB_LOST, True)
    assert end.message.endswith("has been restarted, which has ended the job")
