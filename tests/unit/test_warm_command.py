"""Commands that can run in a warm interpreter."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.core.warm_command import WarmCommand, warm_command


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("python train.py", WarmCommand("python", "train.py")),
        ("python3 -u train.py", WarmCommand("python3", "train.py", is_unbuffered=True)),
        ("  python3.11\ttrain.py  \n", WarmCommand("python3.11", "train.py")),
        ("/opt/conda/bin/python a/b.py", WarmCommand("/opt/conda/bin/python", "a/b.py")),
        ("python t.py --lr=0.1 -v x,y", WarmCommand("python", "t.py", ("--lr=0.1", "-v", "x,y"))),
        ("python t.py -u", WarmCommand("python", "t.py", ("-u",))),
        ("python t.py '' \"a b\"'$c'd", WarmCommand("python", "t.py", ("", "a b$cd"))),
        ("python 'my script.py' \"it's\"", WarmCommand("python", "my script.py", ("it's",))),
    ],
)
def test_a_plain_python_command_is_parsed_for_the_warm_interpreter(command, wanted):
    assert warm_command(command) == wanted


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python",
        "python -u",
        "python -u -u train.py",
        "python -m train",
        "python -c 'import train.py'",
        "python -O train.py",
        "python -x.py",
        "python train",
        "python train.pyc",
        "./train.py",
        "bash train.py",
        "pythonw train.py",
        "python2 train.py",
        "torchrun train.py",
        "LR=1 python train.py",
        "exec python train.py",
        "cd src && python train.py",
        "python train.py; echo done",
        "python train.py &",
        "python train.py | tee log",
        "python train.py > log",
        "python train.py 2>&1",
        "python train.py $LR",
        'python train.py "$LR"',
        "python train.py `date`",
        "python train.py *.csv",
        "python train.py a?",
        "python train.py [ab]",
        "python train.py {a,b}",
        "python train.py ~/data",
        "python train.py --to=~/data",
        "python train.py a\\ b",
        "python train.py # now",
        "python train.py\npython test.py",
        "python train.py 'open",
        'python train.py "open',
        "(python train.py)",
        "! python train.py",
        "python train.py \0",
    ],
)
def test_a_command_with_shell_syntax_or_interpreter_options_cannot_use_the_warm_interpreter(command):
    assert warm_command(command) is None


# A command line cannot contain a NUL byte, so the words contain none.
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(words), words, st.booleans())
def test_quoted_words_are_parsed_unchanged(arguments, stem, is_unbuffered):
    script = f"./{stem}.py"
    flags = ["-u"] if is_unbuffered else []
    command = shlex.join(["python3", *flags, script, *arguments])
    assert warm_command(command) == WarmCommand("python3", script, tuple(arguments), is_unbuffered)


@given(st.text())
def test_any_text_is_parsed_as_a_trial_command_without_an_exception(text):
    warm_command(text)
    warm_command(f"python train.py {text}")
