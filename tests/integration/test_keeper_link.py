"""The keeper's stream to the manager, and every kind of interruption of this stream."""

import contextlib
import os
import signal
import time

import pytest
from attempts import attempt_id
from deadlines import scaled_s
from fake_manager import KEY, TRIAL
from free_ports import free_port_pair
from real_experiment import wait_until
from strangers import NOBODY, give_away
from transport_proxy import ProxyProcess

from nni_manager.domain.admission_errors import InvalidToken, ProtocolError, UnknownJob, VersionRefused
from nni_manager.domain.ingest import OffsetGap
from nni_sdk.records import decode
from trial_keeper.core.link import jitter
from trial_keeper.core.replication import LOG_WINDOW_BYTES, METRICS_WINDOW_BYTES
from trial_keeper.wire.messages import (
    Chunk,
    Hello,
    RunTrial,
    Shutdown,
    StopTrial,
    Stream,
    TrialEnded,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason

RECORDS = 2000
# The trial reports half of the records, waits at the gate, and then reports the other half.
GATED = f"""
import sys
import nni_sdk as nni
nni.get_next_parameter()
for i in range({RECORDS}):
    nni.report_intermediate_result({{"default": i, "note": "é" * (i % 50)}})
    print("line", i)
    print("error", i, file=sys.stderr)
    if i == {RECORDS // 2}:
        sys.stdout.flush()
        open("gate").read()
"""


def exit_of(site):
    return site.exit()


def assert_all_is_stored_once(site, *streams):
    for stream in streams or (Stream.METRICS,):
        assert site.manager.stored(stream) == site.file(stream), stream
    assert site.manager.store.records[KEY] == decode(site.file(), 0).records
    assert len(site.manager.store.records[KEY]) == RECORDS
    assert exit_of(site).final_sizes[Stream.METRICS] == len(site.file())


# ---- broken links


@pytest.mark.parametrize("collect_logs", [False, True])
def test_no_byte_is_lost_or_duplicated_if_the_link_breaks_repeatedly(site, collect_logs):
    site.gate("gate")
    site.add_python_trial(GATED)
    site.manager.drop_after_bytes = [0, 1, 1000, 20_000, 70_000]
    keeper = site.start_keeper(collect_logs=collect_logs)
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert_all_is_stored_once(site, *(Stream if collect_logs else (Stream.METRICS,)))
    assert site.manager.hellos == 6
    assert site.manager.drop_after_bytes == []


def test_lost_bytes_are_sent_again_after_a_reconnect(site, caplog):
    site.gate("gate")
    site.add_python_trial(GATED)
    site.manager.swallow_chunks = 1
    keeper = site.start_keeper()
    site.manager.wait_for(lambda: site.manager.swallow_chunks == 0, "a chunk is lost")
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert_all_is_stored_once(site)
    # The manager refuses the next chunk because of the gap. This error is in its log, but the keeper may receive only gRPC's
    # error for a closed stream.
    assert f"cannot accept metrics of {KEY} from offset" in caplog.text
    assert site.manager.hellos == 2


def test_a_keeper_replaces_a_connection_whose_bytes_a_proxy_accepts_but_does_not_deliver(site):
    site.gate("gate")
    site.add_python_trial(GATED)
    port = free_port_pair()
    proxy = ProxyProcess(f"127.0.0.1:{port}", site.manager.address)
    try:
        site.manager.write_document(f"127.0.0.1:{port}")
        keeper = site.start_keeper()
        site.manager.wait_for(site.manager.stored, "something is committed")
        proxy.order("break")
        site.open_gate("gate")
        assert keeper.wait() == 0
        # If the keeper kept the dead connection, it would wait 30 s and exit without sending the remaining bytes.
        assert_all_is_stored_once(site)
        assert site.manager.all_of(TrialEnded) == [exit_of(site)]
    finally:
        proxy.close()


def test_a_restarted_manager_receives_all_bytes_that_it_had_not_committed(site):
    site.gate("gate")
    site.add_python_trial(GATED)
    keeper = site.start_keeper(collect_logs=True)
    site.manager.wait_for_bytes(b'\\"default\\": 500,')
    site.manager.wait_for(site.manager.stored, "something is committed")
    site.manager.commits = False
    site.open_gate("gate")
    site.manager.wait_for(lambda: site.manager.store.ended, "the end has arrived")
    durable = {stream: len(site.manager.stored(stream)) for stream in Stream}
    site.manager.die()
    site.manager.messages.clear()
    site.manager.store.ended.clear()

    site.manager.commits = True
    site.manager.start()
    assert keeper.wait() == 0
    assert_all_is_stored_once(site, *Stream)
    assert site.manager.messages[0] == site.manager.all_of(Hello)[0]
    assert site.manager.all_of(Hello)[0].attempts == (KEY,)
    for stream in Stream:
        offsets = [chunk.offset for chunk in site.manager.all_of(Chunk) if chunk.stream is stream]
        if durable[stream] < len(site.file(stream)):
            assert offsets[0] == durable[stream], stream
    assert site.manager.all_of(TrialEnded) == [exit_of(site)]


def test_a_keeper_reconnects_within_seconds_after_its_manager_restarts_at_another_address(site):
    site.gate("gate")
    site.add_python_trial(GATED)
    keeper = site.start_keeper()
    site.manager.wait_for(site.manager.stored, "something is committed")
    site.manager.die()
    wait_until(lambda: "the link to the manager is down" in keeper.stderr, "the keeper has detected it")
    asked_before = site.manager.hellos
    site.manager.start()
    returned_at_s = time.monotonic()
    site.manager.wait_for(lambda: site.manager.hellos > asked_before, "another Hello")
    assert time.monotonic() - returned_at_s < scaled_s(5)
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert_all_is_stored_once(site)


def test_a_manager_that_starts_after_the_trial_end_receives_all_bytes(silent_site):
    site = silent_site
    site.gate("gate")
    site.add_python_trial(GATED)
    keeper = site.start_keeper(collect_logs=True)
    site.open_gate("gate")
    wait_until(site.has_ended, "the trial has ended")
    site.manager.start()
    assert keeper.wait() == 0
    assert_all_is_stored_once(site, *Stream)
    assert len(site.manager.all_of(TrialStarted)) == 1


def test_a_keeper_tries_all_addresses_until_the_manager_responds(site):
    site.gate("gate")
    site.add_python_trial(GATED)
    site.manager.write_document("127.0.0.1:9", "127.0.0.1:10", site.manager.address)
    keeper = site.start_keeper()
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert_all_is_stored_once(site)


def test_a_keeper_reads_manager_json_again_if_the_file_was_temporarily_damaged(site):
    site.gate("gate")
    site.add_python_trial(GATED)
    keeper = site.start_keeper()
    site.manager.wait_for(site.manager.stored, "something is committed")
    site.workspace.manager_json.write_bytes(b"{")
    site.manager.break_streams()
    wait_until(
        lambda: "cannot read manager.json" in keeper.stderr or "is down" in keeper.stderr,
        "the keeper has detected it",
    )
    site.manager.write_document()
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert_all_is_stored_once(site)


def test_a_keeper_that_receives_no_acks_sends_at_most_one_window_per_stream(site):
    site.manager.commits = False
    site.add_python_trial(
        "import nni_sdk as nni\n"
        "nni.get_next_parameter()\n"
        f"for i in range({RECORDS}):\n"
        "    nni.report_intermediate_result({'default': i, 'note': 'x' * 3000})\n"
        "    print('y' * 1999)\n"
    )
    keeper = site.start_keeper(collect_logs=True)
    wait_until(site.has_ended, "the trial has ended")
    site.manager.wait_for(lambda: site.manager.all_of(TrialEnded), "TrialEnded")
    site.manager.wait_for(
        lambda: (
            site.manager.arrived() == METRICS_WINDOW_BYTES
            and site.manager.arrived(Stream.STDOUT) == LOG_WINDOW_BYTES
        ),
        "the windows are full",
    )
    assert keeper.process.poll() is None
    site.manager.commit_again()
    assert keeper.wait() == 0
    assert_all_is_stored_once(site, *Stream)


def test_metrics_are_sent_before_logs_that_were_written_earlier(site):
    site.gate("gate")
    site.manager.refuse_with = OffsetGap("cannot take anything yet; come again")
    site.add_python_trial(
        "import nni_sdk as nni\nnni.get_next_parameter()\nprint('y' * 400_000)\nnni.report_final_result(1)\nopen('gate').read()\n"
    )
    keeper = site.start_keeper(collect_logs=True)
    wait_until(
        lambda: site.attempt().stream(Stream.METRICS).is_file() and site.file(), "the result is written"
    )
    site.manager.refuse_with = None
    site.manager.wait_for_message(Chunk)
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert site.manager.all_of(Chunk)[0].stream is Stream.METRICS
    assert all(site.manager.stored(stream) == site.file(stream) for stream in Stream)


# ---- a manager that refuses the keeper


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidToken(),
        UnknownJob(),
        VersionRefused("cannot work with this keeper: too old; pip install"),
        ProtocolError(),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_refused_keeper_does_not_reconnect_and_finishes_its_trial(site, refusal):
    site.manager.refuse_with = refusal
    site.gate("gate")
    site.add_python_trial(GATED + "sys.exit(6)\n")
    keeper = site.start_keeper(linger_s=1)
    wait_until(lambda: "the manager refused" in keeper.stderr, "the keeper is refused")
    site.open_gate("gate")
    assert keeper.wait() == 6
    assert site.manager.hellos == 1
    assert keeper.stderr.count(f"the manager refused: {refusal}") == 1
    assert len(decode(site.file(), 0).records) == RECORDS
    assert (exit_of(site).exit_code, exit_of(site).final_sizes) == (6, {Stream.METRICS: len(site.file())})


def test_a_refused_keeper_connects_again_when_manager_json_changes(site):
    site.manager.refuse_with = InvalidToken()
    site.gate("gate")
    site.add_python_trial(GATED)
    keeper = site.start_keeper()
    wait_until(lambda: "the manager refused" in keeper.stderr, "the keeper is refused")
    site.manager.refuse_with = None
    site.manager.write_document()
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert_all_is_stored_once(site)
    assert site.manager.hellos == 2


def test_the_log_of_a_refused_keeper_does_not_show_its_token(site):
    site.add_trial("exit 2")
    keeper = site.start_keeper(token="of-another-experiment", linger_s=0.5)
    assert keeper.wait() == 2
    assert "its token is not valid for its job" in keeper.stderr
    assert "of-another-experiment" not in keeper.stderr
    assert site.manager.hellos == 1


def test_a_keeper_retries_with_growing_delays_after_a_retryable_error(site):
    site.manager.refuse_with = OffsetGap("cannot take anything yet; come again")
    site.gate("gate")
    site.add_python_trial(GATED)
    began_at_s = time.monotonic()
    keeper = site.start_keeper()
    site.manager.wait_for(lambda: site.manager.hellos == 4, "four connections")
    assert time.monotonic() - began_at_s > (0.2 + 0.4 + 0.8) * (1 - jitter(TRIAL) / 2)
    site.manager.refuse_with = None
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert_all_is_stored_once(site)
    assert keeper.stderr.count("cannot take anything yet") == 1


def test_a_keeper_of_a_single_trial_refuses_a_second_trial(site):
    site.gate("gate")
    site.add_python_trial(GATED)
    keeper = site.start_keeper(linger_s=0.5)
    site.manager.wait_for(site.manager.stored, "something is committed")
    site.manager.send(RunTrial("trial2", attempt_id(0)))
    wait_until(
        lambda: "trial trial2 is not started: this job is draining" in keeper.stderr,
        "the keeper logs the refusal",
    )
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert len(decode(site.file(), 0).records) == RECORDS


# ---- requests of the manager

WAITING = """
import os
import signal
import nni_sdk as nni
nni.get_next_parameter()
nni.report_intermediate_result("ready")
while True:
    signal.pause()
"""


def test_a_shutdown_message_stops_the_trial_and_the_keeper(site):
    site.add_python_trial(WAITING)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    site.manager.send(Shutdown("the experiment is over"))
    assert keeper.wait() == 128 + signal.SIGTERM
    assert exit_of(site).reason is ExitReason.JOB_LOST
    assert "the manager sent Shutdown: the experiment is over" in keeper.stderr


def test_a_keeper_stops_a_trial_if_the_manager_reports_a_closed_attempt_after_a_reconnect(site):
    site.add_python_trial(WAITING)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    site.manager.store.closed.add(KEY)
    site.manager.break_streams()
    assert keeper.wait() == 128 + signal.SIGTERM
    assert exit_of(site).reason is ExitReason.JOB_LOST


def test_a_stop_command_has_no_effect_if_the_trial_is_already_stopping_or_has_ended(site):
    site.manager.closes = False
    site.add_python_trial(WAITING)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    for reason in (ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER):
        site.manager.send(StopTrial(TRIAL, reason))
    site.manager.wait_for_message(TrialEnded)
    site.manager.send(StopTrial(TRIAL, ExitReason.TIME_LIMIT))
    site.manager.closes = True
    site.manager.break_streams()
    assert keeper.wait() == 128 + signal.SIGTERM
    assert {ended.reason for ended in site.manager.all_of(TrialEnded)} == {ExitReason.EARLY_STOPPED}


# ---- truncated and deleted files


def test_a_keeper_reports_the_end_of_a_trial_that_truncates_its_stdout_repeatedly(site):
    site.add_python_trial(
        "import os\n"
        "import nni_sdk as nni\n"
        "nni.get_next_parameter()\n"
        "for i in range(20):\n"
        "    print('y' * 300_000, flush=True)\n"
        "    os.truncate(os.environ['NNI_OUTPUT_DIR'] + '/stdout', 10 * i)\n"
        "nni.report_final_result(1)\n"
    )
    keeper = site.start_keeper(collect_logs=True)
    assert keeper.wait() == 0
    assert site.manager.stored() == site.file()
    assert exit_of(site) == site.manager.all_of(TrialEnded)[-1]


CUTTING = """
import os, sys
import nni_sdk as nni
nni.get_next_parameter()
sys.stdout.write("y" * 3_000_000)
sys.stdout.flush()
nni.report_intermediate_result("written")
open("written").read()
os.truncate(os.environ["NNI_OUTPUT_DIR"] + "/stdout", {size})
for i in range(100):
    nni.report_intermediate_result(i)
if {goes_on}:
    open("noticed").read()
    print("z" * 3_000_000, flush=True)
    for i in range(100, 200):
        nni.report_intermediate_result(i)
nni.report_final_result("done")
"""


@pytest.fixture
def truncating_site(site):
    """Return a function that starts a trial. When one window of stdout has arrived at the manager, the trial truncates its stdout
    to `size`. The manager has stored nothing at that time.
    """

    def begin(size, *, goes_on):
        site.gate("written")
        site.gate("noticed")
        site.manager.commits = False
        site.add_python_trial(CUTTING.format(size=size, goes_on=goes_on))
        keeper = site.start_keeper(collect_logs=True)
        site.manager.wait_for(
            lambda: site.manager.arrived(Stream.STDOUT) == LOG_WINDOW_BYTES,
            "one window of stdout has arrived",
        )
        site.open_gate("written")
        return site, keeper

    return begin


@pytest.mark.parametrize("size", [0, 1000, LOG_WINDOW_BYTES + 100_000])
def test_a_truncated_stream_ends_and_the_remaining_streams_continue(truncating_site, size):
    site, keeper = truncating_site(size, goes_on=True)
    site.manager.wait_for_bytes(b', "value": "99"')
    site.manager.commit_again()
    site.manager.wait_for_bytes(b"the stdout file was truncated", Stream.KEEPER)
    site.open_gate("noticed")
    assert keeper.wait() == 0
    assert site.manager.stored() == site.file()
    assert len(site.manager.store.records[KEY]) == 202
    assert site.manager.stored(Stream.STDOUT) == b"y" * max(size, LOG_WINDOW_BYTES)
    assert site.manager.stored(Stream.KEEPER) == site.file(Stream.KEEPER)
    assert keeper.stderr.count("the stdout file was truncated") == 1
    assert site.manager.hellos == 1
    assert exit_of(site) == site.manager.all_of(TrialEnded)[-1]


def test_a_truncation_found_after_a_manager_restart_reduces_the_reported_final_size(
    truncating_site,
):
    site, keeper = truncating_site(1000, goes_on=False)
    assert site.manager.wait_for_message(TrialEnded).final_sizes[Stream.STDOUT] == LOG_WINDOW_BYTES
    site.manager.die()
    # The keeper may have connected again before the manager closed its port. So the test counts connections only after the port
    # is closed.
    hellos = site.manager.hellos
    site.manager.commits = True
    site.manager.start()
    assert keeper.wait() == 0
    assert site.manager.stored() == site.file()
    assert len(site.manager.store.records[KEY]) == 102
    assert site.manager.stored(Stream.STDOUT) == b"y" * 1000
    assert exit_of(site) == site.manager.all_of(TrialEnded)[-1]
    assert exit_of(site).final_sizes[Stream.STDOUT] == 1000
    assert site.manager.hellos == hellos + 1


def test_a_keeper_reports_the_end_of_a_trial_that_deletes_its_own_folder(site):
    # `rm` fails if the keeper creates its log file in the folder during the removal. So the trial first waits until this file
    # exists.
    site.add_trial(
        'until [ -s "$NNI_OUTPUT_DIR/trial.log" ]; do sleep 0.01; done; cd /; rm -r "$NNI_SYS_DIR"; exit 9'
    )
    keeper = site.start_keeper(collect_logs=True)
    assert keeper.wait() == 9
    assert [ended.exit_code for ended in site.manager.all_of(TrialEnded)][-1:] == [9]
    assert "cannot write to the workspace" in keeper.stderr
    with contextlib.suppress(FileNotFoundError):
        assert list(site.attempt().path.iterdir()) == []


# ---- a port that another user has taken over


def test_a_keeper_does_not_connect_to_a_listener_of_another_user(site):
    give_away(int(site.manager.address.rpartition(":")[2]))
    site.add_python_trial("print('on its own')")
    keeper = site.start_keeper(linger_s=1.0)
    assert keeper.wait() == 0
    assert site.manager.hellos == 0
    assert (
        f"another user of this machine (uid {NOBODY}) listens at {site.manager.address}, so it is not trusted"
        in keeper.stderr
    )


def test_a_keeper_connects_to_a_listener_whose_user_owns_manager_json(site):
    give_away(int(site.manager.address.rpartition(":")[2]))
    os.chown(site.workspace.manager_json, NOBODY, NOBODY)
    site.add_python_trial("print('in a container')")
    assert site.start_keeper().wait() == 0
    assert site.manager.hellos == 1
