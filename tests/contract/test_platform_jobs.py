"""Rules for the jobs of every training service: ends, stops, adoption, and errors of the cluster.

The keepers are shell scripts. Experiments with real keepers are in test_platforms.py.
"""

import asyncio

import pytest
from deadlines import DEADLINE_S

pytest.importorskip("kubernetes")

from platforms import PLATFORMS, QUICK, a_platform
from real_experiment import until

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded, Unauthenticated
from nni_manager.training_services.kubernetes.errors import AlreadyExists, Conflict
from nni_manager.training_services.openpai.connection import JobAlreadyExists
from trial_keeper.wire.reasons import ExitReason

SLEEPS = "STARTED; exec sleep 100"
# On SIGTERM, this keeper exits with code 9 after 0.3 s.
EXITS_ON_REQUEST = """\
trap 'sleep 0.3; touch "$TRIAL_KEEPER_WORKSPACE/exited"; exit 9' TERM
STARTED
sleep 100 & wait
"""
ALREADY_EXISTS = "already exists; (choose another name|delete the object with kubectl)"
# This keeper waits for the file `JOB_ID.code`, and exits with the code in the file.
EXITS_AS_WRITTEN = """\
STARTED
code="$TRIAL_KEEPER_WORKSPACE/$TRIAL_KEEPER_JOB_ID.code"
while [ ! -s "$code" ]; do sleep 0.02; done
exit "$(cat "$code")"
"""


@pytest.fixture(params=PLATFORMS)
def platform(request, tmp_path, monkeypatch):
    with a_platform(request.param, tmp_path, monkeypatch) as platform:
        platform.runs(SLEEPS)
        yield platform


async def test_each_job_receives_its_settings_and_the_platform_reports_its_end_once(platform):
    platform.runs(f"case $TRIAL_KEEPER_ROLE in ps) exec sleep 100;; esac; {platform.settings_arrived}")
    async with platform.manager() as service:
        await service.submit(platform.settings())
        end = await platform.has_ended()
        assert (end.job_id, end.exit_code, end.message) == ("trial1", 0, "")
        await service.submit(platform.settings("trial2"))
        await platform.has_ended(2)
        await platform.is_clean()
        assert [end.job_id for end in platform.ends] == ["trial1", "trial2"]
        assert not service.problem


async def test_a_failed_job_reports_its_exit_code_and_the_end_of_its_stderr(platform):
    platform.runs(
        "case ${TRIAL_KEEPER_ROLE:-worker} in worker|taskrole) ;; *) exec sleep 100;; esac\n"
        "echo first >&2; echo trial-keeper: cannot find the mount >&2; exit 105"
    )
    platform.delay_details()
    async with platform.manager() as service:
        await service.submit(platform.settings())
        end = await platform.has_ended()
        assert (end.exit_code, end.reason) == (105, ExitReason.KEEPER_LOST)
        assert platform.failure in end.message
        last_line = "\ntrial-keeper: cannot find the mount"
        assert end.message.endswith(last_line) is platform.keeps_last_lines
        await platform.is_clean()


async def test_an_oom_killed_job_ends_with_reason_out_of_memory(platform):
    async with platform.manager() as service:
        await service.submit(platform.settings())
        await platform.has_started()
        platform.fill_memory("trial1")
        end = await platform.has_ended()
        assert end.reason is ExitReason.OUT_OF_MEMORY
        assert platform.memory_message in end.message


async def test_the_platform_reports_the_end_of_a_stopped_job_after_the_job_has_exited(platform):
    platform.runs(EXITS_ON_REQUEST)
    async with platform.manager() as service:
        assert not await service.stop("trial1"), "there is no such job"
        await service.submit(platform.settings())
        await platform.has_started()
        assert await service.stop("trial1")
        end = await platform.has_ended()
        assert platform.file("exited").exists()
        assert (end.exit_code, end.reason) == platform.stopped
        assert end.message == platform.stopped_message
        await platform.is_clean()
    assert len(platform.ends) == 1


async def test_the_end_of_a_job_that_is_stopped_during_its_submission_is_reported_once(platform):
    async with platform.manager() as service:
        await service.reserve("trial1")
        submission = asyncio.create_task(service.submit(platform.settings()))
        await asyncio.sleep(0)
        assert await service.stop("trial1")
        await submission
        await platform.has_ended()
        await platform.is_clean()
    assert len(platform.ends) == 1


async def test_a_job_removed_by_another_client_ends_with_the_reason_and_message_of_its_platform(platform):
    async with platform.manager() as service:
        await service.submit(platform.settings())
        await platform.has_started()
        platform.remove("trial1")
        end = await platform.has_ended()
        assert (end.exit_code, end.reason) == platform.removed
        assert end.message == platform.removed_message


async def test_a_job_preempted_by_the_cluster_ends_with_reason_preempted(platform):
    async with platform.manager() as service:
        await service.submit(platform.settings())
        await platform.has_started()
        platform.preempt("trial1")
        end = await platform.has_ended()
        assert service.reports_preemption
        assert (end.exit_code, end.reason) == (None, ExitReason.PREEMPTED)
        assert "reempted" in end.message


async def test_a_restarted_manager_adopts_existing_jobs(platform):
    platform.runs(EXITS_AS_WRITTEN)
    async with platform.manager() as first:
        for job_id in ("trial1", "trial2", "trial3"):
            await first.submit(platform.settings(job_id))
            await platform.has_started(job_id)
        first.on_job_ended = lambda ended: None
    assert platform.ends == []
    platform.file("trial2.code").write_text("1")
    await until(lambda: platform.is_terminal("trial2"), "a job ends without a manager", DEADLINE_S)
    async with platform.manager() as second:
        assert [await second.adopt(f"trial{number}") for number in (1, 2, 3, 4)] == [
            JobPresence.RUNNING,
            JobPresence.ENDED,
            JobPresence.RUNNING,
            JobPresence.UNKNOWN,
        ]
        second.report_end("trial2", stop_was_asked=False)
        missed = await platform.has_ended()
        assert (missed.job_id, missed.exit_code) == ("trial2", platform.missed_exit_code)
        assert platform.adopted_failure in missed.message
        platform.file("trial1.code").write_text("0")
        end = await platform.has_ended(2)
        assert (end.job_id, end.exit_code) == ("trial1", platform.adopted_exit_code)
        assert await second.stop("trial3")
        assert (await platform.has_ended(3)).job_id == "trial3"
        await platform.is_clean()
    assert len(platform.ends) == 3


async def test_an_unreachable_server_is_reported_and_ends_no_job(platform):
    async with platform.manager() as service:
        await service.submit(platform.settings())
        await platform.has_started()
        platform.stop_server()
        await until(lambda: service.problem, "the problem is shown", DEADLINE_S)
        with pytest.raises(RetryableError, match=platform.unreachable):
            await service.submit(platform.settings("trial2"))
        assert await service.stop("trial1")
        assert platform.ends == []
        platform.start_server()
        end = await platform.has_ended()
        assert (end.job_id, end.message) == ("trial1", platform.stopped_message)
        await service.submit(platform.settings("trial2"))
        await platform.has_started("trial2")
        await until(lambda: not service.problem, "the problem is over", DEADLINE_S)
        assert len(platform.ends) == 1


async def test_adopted_jobs_are_regarded_as_running_while_the_server_is_unreachable(platform):
    platform.runs(EXITS_AS_WRITTEN)
    async with platform.manager() as first:
        await first.submit(platform.settings())
        await platform.has_started()
    platform.stop_server()
    platform.file("trial1.code").write_text("0")
    async with platform.manager() as second:
        assert await second.adopt("trial1") is JobPresence.RUNNING
        assert await second.adopt("trial2") is platform.never_submitted
        platform.start_server()
        lost = {"trial2": (None, True, True)} if platform.never_submitted is JobPresence.RUNNING else {}
        await platform.has_ended(1 + len(lost))
    ends = {
        end.job_id: (end.exit_code, end.reason is ExitReason.JOB_LOST, end.is_unknown)
        for end in platform.ends
    }
    assert ends == {"trial1": (0, False, False), **lost}


async def test_a_repeated_submission_creates_only_one_job(platform):
    async with platform.manager() as service:
        platform.answer_submissions(503, QUICK.tries)
        with pytest.raises(RetryableError):
            await service.submit(platform.settings())
        await service.submit(platform.settings())
        # Submit the same job again, as the manager does after a lost response.
        await service.submit(platform.settings())
        await platform.has_started()
        assert await service.stop("trial1")
        await platform.has_ended()
        await platform.is_clean()
    assert len(platform.ends) == 1


async def test_a_job_can_be_stopped_after_its_submission_failed(platform):
    async with platform.manager() as service:
        platform.answer_submissions(503, QUICK.tries)
        with pytest.raises(RetryableError):
            await service.submit(platform.settings())
        assert await service.stop("trial1")
        end = await platform.has_ended()
        assert platform.created_message in end.message
        await platform.is_clean()


async def test_a_foreign_job_with_the_same_name_causes_an_error_and_is_not_changed(platform):
    is_untouched = await platform.create_job_of_others()
    async with platform.manager() as service:
        with pytest.raises((AlreadyExists, JobAlreadyExists), match=ALREADY_EXISTS):
            await service.submit(platform.settings())
        assert not await service.stop("trial1"), "there is no such job"
    assert is_untouched()
    assert not platform.ends


async def test_the_pending_reason_of_a_job_is_shown_until_the_job_starts(platform, monkeypatch):
    async with platform.manager() as service:
        why = platform.have_no_room(monkeypatch)
        await service.submit(platform.settings())
        await until(lambda: why in service.problem, "the reason is shown", DEADLINE_S)
        assert service.pending_reason("trial1") in service.problem
        platform.have_room()
        await platform.has_started()
        await until(lambda: not service.problem, "the problem is over", DEADLINE_S)
        assert service.pending_reason("trial1") == ""


# ---- responses of the server to a submission

LIMIT = "frameworks is forbidden: maximum cpu usage per Container is 2, but limit is 99"
FIX = "; fix the fields that the answer names"
PERMANENT = {
    "openpai": [
        ((400, "InvalidProtocolError", "no such image"), f"no such image{FIX}"),
        ((403, "ForbiddenUserError", "not in this one"), "not in this one; ask an administrator"),
        ((403, "ForbiddenUserError", "bob may not use low-quota, nor quota"), "ask an administrator"),
        ((404, "NoVirtualClusterError", "no such cluster"), "no such cluster; correct virtualCluster"),
        ((404, "NoStorageError", "no such storage"), "no such storage; correct paiStorageConfigName"),
        ((422, "Unprocessable", "not so many GPUs"), f"not so many GPUs{FIX}"),
    ],
    "frameworkcontroller": [
        ((403, "Forbidden", LIMIT), "maximum cpu usage per Container is 2"),
        ((403, "Forbidden", "failed quota: team: must specify cpu"), "must specify cpu"),
        ((422, "Invalid", "spec.taskRoles: Invalid value"), f"spec.taskRoles: Invalid value{FIX}"),
        ((400, "BadRequest", "admission webhook says no"), "admission webhook says no"),
    ],
    "slurm": [
        ((1, "", "Invalid partition name specified"), "partition name specified; correct partition"),
        ((1, "", "Requested node configuration is not available"), "not available; correct nodes"),
    ],
}
TEMPORARY = {
    "openpai": [
        ((403, "ForbiddenUserError", "exceeds the quota of ada"), QuotaExceeded),
        ((401, "UnauthorizedUserError", "Your token is invalid."), Unauthenticated),
        *((status, ClusterUnavailable) for status in (408, 429, 500, 503, "drop")),
        ((404, "NoApiError", "a gateway whose server starts"), RetryableError),
    ],
    "frameworkcontroller": [
        (
            (403, "Forbidden", "frameworks is forbidden: exceeded quota: team, used: 2, limited: 2"),
            QuotaExceeded,
        ),
        ((401, "Unauthorized", "Unauthorized"), Unauthenticated),
        *((status, ClusterUnavailable) for status in (408, 429, 500, 520, "drop")),
        ("conflict", Conflict),
    ],
    "slurm": [
        ((1, "", "Job violates accounting/QOS policy (job submit limit, user's size)"), QuotaExceeded),
        ((1, "", "Socket timed out on send/recv operation"), ClusterUnavailable),
        ("drop", ClusterUnavailable),
    ],
}


RESOURCES = {"openpai": ["jobs"], "frameworkcontroller": ["frameworks", "secrets"], "slurm": ["jobs"]}


@pytest.mark.parametrize(
    ("platform", "resource", "answer", "message"),
    [
        (name, resource, *row)
        for name, of_platform in PERMANENT.items()
        for row in of_platform
        for resource in RESOURCES[name]
    ],
    indirect=["platform"],
)
async def test_a_permanently_refused_submission_raises_an_error_without_a_retry_and_leaves_no_objects(
    platform, resource, answer, message
):
    async with platform.manager() as service:
        platform.answer_submissions(answer, resource=resource)
        with pytest.raises(UserError, match=message):
            await service.submit(platform.settings())
        assert platform.submissions(resource) == 1
        assert not await service.stop("trial1"), "there is no such job"
        await platform.is_clean()
    assert not platform.ends


@pytest.mark.parametrize(
    ("platform", "answer", "error"),
    [(name, *row) for name, of_platform in TEMPORARY.items() for row in of_platform],
    indirect=["platform"],
)
async def test_a_temporarily_refused_submission_raises_a_retryable_error(platform, answer, error):
    async with platform.manager() as service:
        platform.answer_submissions(answer, QUICK.tries)
        with pytest.raises(RetryableError) as raised:
            await service.submit(platform.settings())
        assert isinstance(raised.value, error)
        platform.answer_submissions_well()
        await service.submit(platform.settings())
        await platform.has_started()
