"""The messages between the manager and a remote machine, and the commands that run on the machine."""

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
def test_encoded_messages_are_decoded_unchanged(messages):
    source = io.BytesIO(b"".join(frames.encode(*message) for message in messages))
    assert [frames.read_frame(source) for _ in messages] == messages
    assert frames.read_frame(source) is None


@given(st.integers(0, 60))
def test_an_incomplete_message_is_read_as_none(length):
    whole = frames.encode({"request": "read"}, b"some bytes")
    assert frames.read_frame(io.BytesIO(whole[: min(length, len(whole) - 1)])) is None


@pytest.mark.parametrize(
    "noise", [b"Welcome to this machine!", b"\0\0\0\3\0\0\0\0[1]", b"\0\0\0\3\0\0\0\0{x}"]
)
def test_output_that_is_not_a_message_raises_an_error(noise):
    with pytest.raises(frames.FrameInvalid, match="cannot read a message"):
        frames.read_frame(io.BytesIO(noise))


def test_machines_that_share_a_home_folder_have_separate_folders():
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
def test_the_python_path_of_a_machine_is_prepended_to_the_environment_variable_path(
    tmp_path, python_path, shell
):
    folder = (python_path or "/nowhere").replace("~", str(tmp_path))
    command = render.server_command(RemoteMachine("a", python_path=python_path))
    command = command.replace("command -v trial-keeper > /dev/null", 'printf %s "$PATH"; exit 0')
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([shell, "-c", command], env=environ, capture_output=True, text=True)
    assert done.stdout == ("/usr/bin:/bin" if python_path is None else f"{folder}:/usr/bin:/bin")


def test_the_ssh_command_that_is_shown_to_users_contains_port_and_user():
    assert RemoteMachine("a").command("true") == "ssh a true"
    assert RemoteMachine("a", 2222, "ada").command("true") == "ssh -p 2222 ada@a true"
    assert shlex.split(render.server_command(RemoteMachine("a")))[:3] == ["exec", "bash", "-c"]
