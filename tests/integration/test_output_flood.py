"""A trial whose output is far larger than the keeper's memory."""

import hashlib
from pathlib import Path

from amounts import amount
from deadlines import scaled_s
from real_experiment import wait_until

from trial_keeper.wire.messages import Stream

# The thorough test writes a gigabyte. The short test writes 200 MB, more than ten times the growth of memory that the keeper is
# allowed.
BLOCKS = amount(200, 1000)
BLOCK_BYTES = 1_000_000
# All blocks differ from each other, so that the digest changes if bytes are at a wrong offset.
FLOOD = f"""
import os
for number in range({BLOCKS}):
    block = b"%019d\\n" % number * ({BLOCK_BYTES} // 20)
    while block:
        block = block[os.write(1, block):]
"""
WARM_BYTES = 50 * BLOCK_BYTES
MAX_GROWTH_KB = 16 * 1024


def digest_of(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def peak_memory_kb(pid):
    """The peak memory of a process in KiB; None after the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def test_a_keeper_delivers_a_flood_of_output_in_bounded_memory(a_real_experiment):
    experiment = a_real_experiment(FLOOD, trialConcurrency=1, maxTrialNum=1, logCollection="http")
    experiment.start()
    (stored,) = wait_until(
        lambda: list(experiment.folder.collected_logs.glob("*/*/*/stdout")), "some output is stored"
    )
    wait_until(lambda: stored.stat().st_size >= WARM_BYTES, "the keeper is warm")
    (pid,) = experiment.keeper_pids()
    warm_kb = peak_memory_kb(pid)
    peaks_kb = []

    def keeper_has_ended():
        peak_kb = peak_memory_kb(pid)
        if peak_kb is not None:
            peaks_kb.append((peak_kb, stored.stat().st_size))
        return peak_kb is None

    wait_until(keeper_has_ended, "all output is delivered", scaled_s(150), every_s=0.01)
    peak_kb, seen_bytes = peaks_kb[-1]
    assert seen_bytes > BLOCKS * BLOCK_BYTES * 0.9
    assert peak_kb - warm_kb < MAX_GROWTH_KB
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    written = experiment.stream(trial["trialJobId"], Stream.STDOUT)
    assert stored.stat().st_size == written.stat().st_size == BLOCKS * BLOCK_BYTES
    assert digest_of(stored) == digest_of(written)
