"""nnictl completion: shell completion of commands, options, and the ids of experiments and trials."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from nni_manager.cli.options import example
from nni_manager.client import output

# click derives this environment variable from the program's name.
_VARIABLE = "_NNICTL_COMPLETE"


@click.command(
    epilog=example(
        'eval "$(nnictl completion bash)"                     # this shell',
        "nnictl completion bash >> ~/.bashrc                  # every new one",
        "nnictl completion zsh >> ~/.zshrc",
        "nnictl completion fish > ~/.config/fish/completions/nnictl.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell completion script.

    After the shell has run it, TAB completes commands, options, and the ids of experiments and trials.
    """
    made = get_completion_class(shell)
    assert made is not None  # click supports every choice of the argument
    output.plain(made(context.find_root().command, {}, "nnictl", _VARIABLE).source())
