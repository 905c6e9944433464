"""The messages between the manager and a machine, and the commands that run there."""

import io
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.training_services.remote import frames, render
from nni_manager.training_services.remote.section import RemoteMachine

JSON = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=5)


@given(st.lists(st.tuples(JSON, st.binary(max_size=100))))
def test_messages_arrive_as_they_were_sent(messages):
    source = io.BytesIO(b"".join(frames.encode(*message) for message in messages))
    assert [frames.read_frame(source) for _ in messages] == messages
    assert frames.read_frame(source) is None


@given(st.integers(0, 60))
def test_the_start_of_a_message_is_no_message(length):
    whole = frames.encode({"request": "read"}, b"some bytes")
    assert frames.read_frame(io.BytesIO(whole[: min(length, len(whole) - 1)])) is None


@pytest.mark.parametrize(
    "noise", [b"Welcome to this machine!", b"\0\0\0\3\0\0\0\0[1]", b"\0\0\0\3\0\0\0\0{x}"]
)
def test_other_output_in_place_of_a_message_is_named(noise):
    with pytest.raises(frames.FrameInvalid, match="cannot read a message"):
        frames.read_frame(io.BytesIO(noise))


def test_a_machine_has_a_folder_of_its_own_in_a_home_that_several_share():
    machines = [
        RemoteMachine("a"),
        RemoteMachine("a", 2222),
        RemoteMachine("a", user="ada"),
        RemoteMachine("b"),
    ]
    assert len({render.key_of(machine) for machine in machines}) == 4
    assert render.key_of(RemoteMachine("a", gpu_indices=(1,))) == render.key_of(RemoteMachine("a"))
    assert render.folder_of(RemoteMachine("a"), "abc").endswith("/abc")


@pytest.mark.parametrize("python_path", ["/opt/my python/$HOME/bin", "~/venv's/bin", None])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_python_path_is_first_on_path(tmp_path, python_path, shell):
    folder = (python_path or "/nowhere").replace("~", str(tmp_path))
    command = render.server_command(RemoteMachine("a", python_path=python_path))
    command = command.replace("command -v trial-keeper > /dev/null", 'printf %s "$PATH"; exit 0')
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([shell, "-c", command], env=environ, capture_output=True, text=True)
    assert done.stdout == ("/usr/bin:/bin" if python_path is None else f"{folder}:/usr/bin:/bin")


def test_the_command_for_people_names_port_and_user():
    assert RemoteMachine("a").command("true") == "ssh a true"
    assert RemoteMachine("a", 2222, "ada").command("true") == "ssh -p 2222 ada@a true"
    assert shlex.split(render.server_command(RemoteMachine("a")))[:3] == ["exec", "bash", "-c"]
