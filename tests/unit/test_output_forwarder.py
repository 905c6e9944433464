import contextlib
import os
import select
import threading

import pytest
from deadlines import DEADLINE_S

from trial_keeper.host import output_forwarder as relay_module
from trial_keeper.host.output_forwarder import OutputForwarder


@pytest.fixture
def pipe():
    """Two ends; a test that closes one of them itself says so with None in its place."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "stdout"
    path.touch()
    return path


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def read_exactly(descriptor, size):
    data = b""
    while len(data) < size:
        data += os.read(descriptor, size - len(data))
    return data


def following(target, source):
    relay = OutputForwarder(target)
    relay.follow(source)
    return relay


def end_of(relay):
    relay.finish()
    assert not relay._thread.is_alive()


def test_what_is_appended_comes_out_while_it_grows_and_at_the_end(pipe, source):
    relay = following(pipe[1], source)
    append(source, b"first")
    relay.poll()
    assert read_exactly(pipe[0], 5) == b"first"
    append(source, b" second")
    relay.poll()
    assert read_exactly(pipe[0], 7) == b" second"
    append(source, b" last")
    end_of(relay)
    assert read_exactly(pipe[0], 5) == b" last"


def test_what_was_there_before_is_copied_too(pipe, source):
    append(source, b"early")
    end_of(following(pipe[1], source))
    assert read_exactly(pipe[0], 5) == b"early"


def test_more_than_a_pipe_holds_comes_out_whole(pipe, source):
    content = os.urandom(3_000_000)
    append(source, content)
    relay = following(pipe[1], source)
    assert read_exactly(pipe[0], len(content)) == content
    end_of(relay)


def test_lines_come_out_in_order_without_any_file(pipe):
    relay = OutputForwarder(pipe[1])
    relay.write("one\n")
    assert read_exactly(pipe[0], 4) == b"one\n"
    for number in range(100):
        relay.write(f"{number}\n")
    end_of(relay)
    wanted = b"".join(b"%d\n" % number for number in range(100))
    assert read_exactly(pipe[0], len(wanted)) == wanted


def test_text_that_is_no_utf8_is_said_all_the_same(pipe):
    relay = OutputForwarder(pipe[1])
    relay.write("\udcff é\n")
    end_of(relay)
    assert read_exactly(pipe[0], 5) == "? é\n".encode()


def test_a_reader_that_does_not_read_stops_nobody(pipe, source, monkeypatch):
    monkeypatch.setattr(relay_module, "_MAX_DRAIN_S", 0.05)
    append(source, b"x" * 1_000_000)
    relay = following(pipe[1], source)
    said = threading.Thread(target=lambda: [relay.write("line\n") for _ in range(100_000)])
    said.start()
    said.join(DEADLINE_S)
    assert not said.is_alive()
    relay.finish()
    assert relay._thread.is_alive()  # in its write, until somebody reads or the process ends
    os.close(pipe[0])
    pipe[0] = None
    relay._thread.join(DEADLINE_S)
    assert not relay._thread.is_alive()


def test_a_reader_that_is_gone_ends_the_relay_without_a_word(pipe, source):
    os.close(pipe[0])
    pipe[0] = None
    append(source, b"nobody wants it")
    relay = following(pipe[1], source)
    relay._thread.join(DEADLINE_S)
    assert not relay._thread.is_alive()
    relay.write("nor this\n")
    end_of(relay)


def test_a_full_disk_under_the_descriptor_ends_the_relay_without_a_word(source):
    append(source, b"does not fit")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        relay = following(full, source)
        relay._thread.join(DEADLINE_S)
        end_of(relay)
    finally:
        os.close(full)


def test_a_relay_that_nobody_reads_holds_no_file(pipe, source):
    relay = following(pipe[1], source)
    os.close(pipe[0])
    pipe[0] = None
    relay.write("into the void\n")
    relay._thread.join(DEADLINE_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        relay.follow(source)
    assert len(os.listdir("/proc/self/fd")) == before


def test_lines_that_nobody_reads_are_left_out_and_counted(pipe, monkeypatch):
    monkeypatch.setattr(relay_module, "_MAX_LINES_BYTES", 10_000)
    os.set_blocking(pipe[1], False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe[1], bytes(select.PIPE_BUF))
    os.set_blocking(pipe[1], True)
    relay = OutputForwarder(pipe[1])
    line = "x" * 99 + "\n"
    for _ in range(5000):
        relay.write(line)
    assert relay._lines_bytes == 10_000
    assert relay._dropped == 4900
    read = threading.Event()
    seen = bytearray()

    def drain():
        while data := os.read(pipe[0], 65_536):
            seen.extend(data)
            if b"were dropped" in seen:
                read.set()

    reader = threading.Thread(target=drain)
    reader.start()
    while not read.wait(0.01):
        relay.write("and so on\n")
    end_of(relay)
    os.close(pipe[1])
    pipe[1] = None
    reader.join()
    assert b"lines were dropped here: the reader had stalled\nand so on\n" in seen


def test_files_that_nobody_reads_do_not_stay_open_without_end(pipe, source, monkeypatch):
    monkeypatch.setattr(relay_module, "_MAX_SOURCES", 3)
    append(source, b"x" * 1_000_000)
    relay = following(pipe[1], source)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        relay.follow(source)
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    os.close(pipe[0])
    pipe[0] = None
    end_of(relay)
