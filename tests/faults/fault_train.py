"""The trials of a run: they report, and record each report in a ledger that no fault reaches."""

# Every other trial gives up when a report is refused, like most training code. The others continue and
# succeed. Two of four ask whether they are to stop, and end with a result then.
TRAIN = """
import os, sys, time
import nni_sdk as nni
from nni_sdk.errors import MetricNotWritten

attempt = os.path.dirname(os.environ["NNI_SYS_DIR"])
run = int.from_bytes(os.urandom(4), "big")
name = "%s.%s.%d" % (os.environ["NNI_TRIAL_JOB_ID"], os.path.basename(attempt), run)
# No fsync: processes die here, and the machine does not.
ledger = os.open(os.path.join({ledgers!r}, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
gives_up = int(os.environ["NNI_TRIAL_SEQ_ID"]) % 2
asks = int(os.environ["NNI_TRIAL_SEQ_ID"]) % 4 < 2

def note(text):
    os.write(ledger, (text + "\\n").encode())

def report(call, value):
    note("? %s" % value)
    try:
        call(value)
    except MetricNotWritten:
        note("- %s" % value)
        return False
    note("+ %s" % value)
    return True

nni.get_next_parameter()
base = run * {stride}
for i in range({reports}):
    while not report(nni.report_intermediate_result, base + i):
        if gives_up or not os.path.isdir(attempt):
            note("gave up")
            sys.exit(1)
        time.sleep(0.2)
    if i % 50 == 0:
        try:
            os.write(1, b"report %d\\n" % i)
        except OSError:
            pass  # the same storage
    if i % 20 == 0:
        time.sleep({rest_s})
    if asks and nni.should_stop():
        break
while not report(nni.report_final_result, base + {reports}):
    if not os.path.isdir(attempt):
        note("gave up")
        sys.exit(1)
    time.sleep(0.2)
note("end")
"""
