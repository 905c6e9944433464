"""The measurements of other tools in `make bench`, with few trials. The tests do not check the measured values."""

import re
import tempfile
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.peer, pytest.mark.timeout(300)]

NO_RAY = "Ray Tune is not installed: make peers"


def test_ray_tune_is_measured_with_and_without_its_loggers_and_leaves_no_process(benchmark_module):
    ray_tune = benchmark_module("bench_turnaround").ray_tune
    # Ray creates sockets below this folder, and the length of their paths is limited. So the test uses a shorter folder than
    # tmp_path.
    with tempfile.TemporaryDirectory() as folder:
        (ray,) = ray_tune(Path(folder, "ray"), 6, 0)
        if ray == NO_RAY:
            pytest.skip(ray)
        assert ray.recording_ms > 0
        assert ray.unrecorded_ms > 0
        assert not [each for each in psutil.process_iter() if folder in " ".join(cmdline(each))]


def test_syne_tune_is_measured_with_two_poll_intervals_and_leaves_no_process(benchmark_module, tmp_path):
    found = benchmark_module("bench_turnaround").syne_tune(tmp_path / "syne", 3, 2)
    if found == "Syne Tune is not installed: make peers":
        pytest.skip(found)
    assert re.fullmatch(r"Syne Tune \d+ ms \(\d+ with its default poll\)", found), found
    assert not [each for each in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(each))]


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
