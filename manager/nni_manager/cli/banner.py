"""The eight commands that a new user needs first, in the format of NNI."""

from nni_manager.client import output

_COMMANDS = (
    ("nnictl experiment show", "show the information of experiments"),
    ("nnictl trial ls", "list all of trial jobs"),
    ("nnictl top", "monitor the status of running experiments"),
    ("nnictl log stderr", "show stderr log content"),
    ("nnictl log stdout", "show stdout log content"),
    ("nnictl stop", "stop an experiment"),
    ("nnictl trial kill", "kill a trial job by id"),
    ("nnictl --help", "get help information about nnictl"),
)


def print_commands() -> None:
    """Print the list of commands.

    Source: the output of `nnictl create` of NNI v1.3.
    """
    output.plain("You can use these commands to get more information about the experiment")
    output.plain(output.RULE)
    output.plain("         commands                       description")
    for number, (command, description) in enumerate(_COMMANDS, 1):
        output.plain(f"{number}. {command:<30}{description}")
    output.plain(output.RULE)
    output.plain("`nnictl COMMAND --help` shows the options of a command and an example")
