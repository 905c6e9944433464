"""The commands that a user needs first: all of them for a bare `nnictl`, and the next ones after `nnictl create`."""

from nni_manager.client import output

_START = ("create exp.yml", "start the experiment of a file")
_NEXT = (
    ("top {}", "watch the progress"),
    ("trial ls {}", "list the trials"),
    ("log trial {} -T TRIAL", "show the output of a trial"),
    ("stop {}", "stop the experiment"),
)
_MORE = (
    ("webui url", "print a link to its page"),
    ("resume", "resume the experiment"),
)


def print_first_steps() -> None:
    """Print the commands of a first experiment, from its start to its end."""
    output.plain("First steps with an experiment:")
    output.plain()
    _print((_START, *_NEXT, *_MORE))
    output.plain()
    output.plain("They use the experiment that runs, else the latest; an ID names another one.")
    output.plain("`nnictl --help` lists all commands; `nnictl help` lists the documentation.")


def print_next_steps(experiment_id: str) -> None:
    """Print the commands for an experiment that has just started."""
    _print(_NEXT, experiment_id)


def _print(commands: tuple[tuple[str, str], ...], experiment_id: str = "") -> None:
    lines = [(" ".join(command.format(experiment_id).split()), use) for command, use in commands]
    width = max(len(command) for command, _ in lines)
    for command, use in lines:
        output.plain(f"  nnictl {command:<{width}}  {use}")
