"""The resource usage of a trial, read from /proc and from folders."""

import os
import subprocess
import time

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.host.usage import INTERVAL_S, UsageSampler, size_on_disk
from trial_keeper.processes import ProcessStat, descendants, end_all
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.small_files import read_all

KEY = AttemptKey("t0", attempt_id(0), "main-0")
TICK_S, PAGE_BYTES = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
# The line has the kernel's format, with utime 3, stime 5, cutime 7, cstime 11 and 13 resident pages.
STAT = b"42 (%s) S 7 41 43 0 -1 4194304 1 1 1 1 3 5 7 11 20 0 1 0 99 1000 13 18446744073709551615 1 1\n"


@given(st.binary(max_size=16))
def test_proc_stat_is_parsed_for_any_process_name(name):
    stat = ProcessStat.from_bytes(STAT % name)
    assert stat == ProcessStat("S", 7, 43, pytest.approx(26 * TICK_S), 99, 13 * PAGE_BYTES)


@pytest.mark.parametrize("content", [b"", b"42 (sh", b"42 (sh) S 1 2", b"42 (sh) " + b"x " * 40])
def test_a_malformed_stat_file_raises_an_error(content):
    with pytest.raises(ValueError):  # noqa: PT011 - any message
        ProcessStat.from_bytes(content)


def test_the_descendants_of_a_process_include_no_other_processes():
    with (
        subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        try:
            while not (below := descendants((shell.pid,))):
                time.sleep(0.001)
            assert {ProcessStat.of(pid).parent for pid in below} == {shell.pid}
            assert descendants(below) == []
            assert {shell.pid, other.pid, *below} <= set(descendants((os.getpid(),)))
            others = descendants((os.getpid(),), lambda pid: pid == shell.pid)
            assert other.pid in others
            assert {shell.pid, *below}.isdisjoint(others)
        finally:
            end_all(lambda: [shell.pid, other.pid, *descendants((shell.pid,))])


def test_all_processes_are_scanned_if_the_kernel_lists_no_children(monkeypatch):
    def no_lists(path):
        if "children" in str(path):
            raise FileNotFoundError(path)
        return read_all(path)

    monkeypatch.setattr("trial_keeper.processes.read_all", no_lists)
    monkeypatch.setattr("os.path.exists", lambda _: False)
    with subprocess.Popen(["sleep", "60"]) as child:
        found = descendants((os.getpid(),))
        child.kill()
    assert child.pid in found


def test_the_stat_file_of_this_process_is_parsed():
    own = ProcessStat.of(os.getpid())
    assert own.parent == os.getppid()
    assert own.rss_bytes > 1_000_000


def test_the_size_of_a_folder_is_the_disk_space_of_its_files(tmp_path):
    assert size_on_disk(tmp_path / "nothing") == 0
    empty = size_on_disk(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "big").write_bytes(os.urandom(1_000_000))
    (tmp_path / "link").symlink_to("/")
    assert empty + 1_000_000 <= size_on_disk(tmp_path) < empty + 1_100_000


def test_a_sparse_file_counts_only_its_allocated_blocks(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**9)
    assert size_on_disk(tmp_path) < 10**6


def test_usage_sampling_takes_less_than_one_500th_of_a_core(tmp_path):
    sampler = UsageSampler(KEY, tmp_path, None)
    started_s = time.thread_time()
    sampler.sample()
    took_s = time.thread_time() - started_s
    assert sampler.delay_s >= INTERVAL_S
    assert took_s < 0.002 * sampler.delay_s


def test_the_disk_usage_of_a_folder_with_many_files_is_measured_less_often(tmp_path):
    for number in range(2000):
        (tmp_path / str(number)).touch()
    sampler = UsageSampler(KEY, tmp_path, None)
    first = sampler.sample().disk_bytes
    (tmp_path / "big").write_bytes(bytes(10**6))
    assert sampler.sample().disk_bytes == first
    assert sampler.delay_s >= INTERVAL_S, "processes are still sampled at the usual interval"
