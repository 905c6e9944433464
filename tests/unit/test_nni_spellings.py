"""Each command and option of NNI's nnictl is accepted, translated, or refused with a remedy."""

import click
import pytest

from nni_manager.cli.main import cli, run
from nni_manager.cli.nni_spellings import CommandOfNni, translated

# These are the commands of nnictl with their options. Source: NNI v1.9, v2.10 and v3.0.
OF_NNI = {
    "create": "--config -c --port -p --debug -d --foreground -f",
    "resume": "--port -p --debug -d --foreground -f --experiment_dir -e",
    "view": "--port -p --experiment_dir -e",
    "update searchspace": "--filename -f",
    "update concurrency": "--value -v",
    "update duration": "--value -v",
    "update trialnum": "--value -v",
    "stop": "--port -p --all -a",
    "trial ls": "--head --tail",
    "trial kill": "--trial_id -T",
    "trial codegen": "--trial_id -T",
    "experiment show": "",
    "experiment status": "",
    "experiment list": "--all",
    "experiment delete": "--all",
    "experiment import": "--filename -f",
    "experiment export": "--type -t --filename -f --intermediate -i",
    "experiment save": "--path -p --saveCodeDir -s",
    "experiment load": "--path -p --codeDir -c --logDir -l --searchSpacePath -s",
    "platform clean": "--config -c",
    "webui url": "",
    "config show": "",
    "log stdout": "--tail -T --head -H --path",
    "log stderr": "--tail -T --head -H --path",
    "log trial": "--trial_id -T",
    "algo register": "--meta_path -m",
    "algo reg": "--meta_path -m",
    "algo unregister": "",
    "algo unreg": "",
    "algo show": "",
    "algo list": "",
    "tensorboard start": "--trial_id -T --port",
    "tensorboard stop": "",
    "top": "--time -t",
    "trainingservice list": "",
}
REFUSED = {
    "hello": "nnictl create --config examples/digits/config.yml",
    "ss_gen --trial_command x --trial_dir . --file y": "annotations and useAnnotation: true",
    "package install --name BOHB": "nnictl algo --help",
    "package list --all": "nnictl algo --help",
    "trainingservice register --package x": "`nnictl trainingservice list` then shows it",
    "trainingservice unregister --package x": "uninstall the package",
    "jupyter-extension install": "nnictl webui url",
    "jupyter-extension uninstall": "nnictl webui url",
    "webui nas --port 6060 --logdir .": "use the package nni",
}


def options_of(words):
    """The option names of the command at the start of `words`, and the words that follow the command."""
    command = cli
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    return {name for each in command.params for name in each.opts}, words


@pytest.mark.parametrize(("command", "options"), OF_NNI.items(), ids=OF_NNI)
def test_each_supported_command_and_option_of_nni_is_accepted(command, options):
    for option in ["", *options.split()]:
        known, words = options_of(translated(cli, [*command.split(), *filter(None, [option])]))
        assert set(words) <= known, option


@pytest.mark.parametrize(("line", "remedy"), REFUSED.items(), ids=REFUSED)
def test_each_unsupported_command_of_nni_is_refused_with_a_remedy(capsys, line, remedy):
    with pytest.raises(CommandOfNni, match=f"cannot run nnictl {line.split()[0]}"):
        translated(cli, line.split())
    assert run(line.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert remedy in captured.err


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("trial kill ID --trial_id aB3dE", "trial kill ID --trial-id aB3dE"),
        ("trial kill ID --trial_id=a_b", "trial kill ID --trial-id=a_b"),
        ("create --conf x_y.yml --for", "create --config x_y.yml --foreground"),
        ("algo reg --meta_path m.yml", "algo register --meta m.yml"),
        ("algo reg --meta m.yml", "algo register --meta m.yml"),
        ("config show ID", "experiment show ID"),
        ("stop all", "stop --all"),
        ("resume ID --experiment_dir /a_b", "resume ID --experiment_dir /a_b"),
        ("experiment save ID --saveC", "experiment save ID --saveCodeDir"),
        # These command lines stay unchanged: ambiguous or unknown options, words after --, and words that are not options.
        ("trial ls --h", "trial ls --h"),
        ("trial ls --heat", "trial ls --heat"),
        ("experiment delete -- --al", "experiment delete -- --al"),
        ("trial ls all", "trial ls all"),
        ("nothing --al", "nothing --al"),
        ("experiment", "experiment"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_a_command_line_of_nni_is_translated_into_the_current_spelling(written, ours):
    assert translated(cli, written.split()) == ours.split()


def test_command_lines_in_the_current_spelling_are_unchanged():
    def lines(command, path):
        if isinstance(command, click.Group):
            for name, each in command.commands.items():
                yield from lines(each, [*path, name])
        else:
            yield path
            for option in (name for each in command.params for name in each.opts if name.startswith("-")):
                yield [*path, option]

    for line in lines(cli, []):
        assert translated(cli, line) == line
