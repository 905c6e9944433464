"""The training code of the trials in a run. A trial records each of its reports in a ledger that no fault affects.

In some runs the trials save checkpoints. A checkpoint contains all values up to its step, so the ledger of a continued
attempt starts with these values.
"""

# If the SDK raises MetricNotWritten, a trial with an odd sequence id does not catch it and fails, like most training code. A
# trial with an even id repeats the report and succeeds. In each group of four trials, the first two call `should_stop()`, and end
# with a result if it returns True.
TRAIN = """
import json, os, sys, time
import nni_sdk as nni
from nni_sdk.errors import CheckpointNotSaved, MetricNotWritten

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

def wait_at(place):
    # A fault names the place in a file, and waits for the second one. It ends this process, or removes the first.
    request = os.path.join({holds!r}, os.environ["NNI_TRIAL_JOB_ID"])

    def is_held():
        try:
            with open(request) as file:
                return file.read() == place
        except FileNotFoundError:
            return False

    if is_held():
        open(request + "." + place, "w").close()
        while is_held():
            time.sleep(0.02)

rename, replace = os.rename, os.replace

def held_rename(source, target):
    wait_at("content")
    rename(source, target)

def held_replace(source, target):
    wait_at("manifest")
    replace(source, target)
    wait_at("named")

def save():
    def write(folder):
        with open(os.path.join(folder, "curve"), "w") as file:
            json.dump(curve, file)

    os.rename, os.replace = held_rename, held_replace
    try:
        nni.save_checkpoint(write)
    except (CheckpointNotSaved, MetricNotWritten):
        note("not saved")
    finally:
        os.rename, os.replace = rename, replace

nni.get_next_parameter()
base = run * {stride}
curve = []
path = nni.load_checkpoint() if {saves_every} else None
if path is not None:
    with open(os.path.join(path, "curve")) as file:
        curve = json.load(file)
    parts = path.split(os.sep)
    note(" ".join(["<", parts[-4], parts[-1], *map(str, curve)]))
for i in range(len(curve), {reports}):
    while not report(nni.report_intermediate_result, base + i):
        if gives_up or not os.path.isdir(attempt):
            note("gave up")
            sys.exit(1)
        time.sleep(0.2)
    curve.append(base + i)
    if {saves_every} and len(curve) % {saves_every} == 0:
        save()
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
