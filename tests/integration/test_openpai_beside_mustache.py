"""This project and mustache.js render the same generated templates, with the same loop as in OpenPAI's server.

`docs/openpai-jobs.md` lists the differences between the two.
"""

import random
from pathlib import Path

from amounts import amount
from node_program import output_of

from nni_manager.training_services.openpai.templates import TemplateInvalid, fill_at_submission

VARIABLES = {
    "$parameters": {
        "text": "a&b<c>", "empty": "", "number": 1.5, "large": 1e21, "zero": 0, "false": False, "nothing": None,
        "list": [1, "two", [3, None], {"x": "y"}], "none": [], "deep": {"list": ["z"], "length": "own", "0": "zero"}, "äö": "ü😀",
    },
    "$data": {"uri": ["/data"], "name": "d"},
    "$output": {"uri": "/out"},
}  # fmt: skip
STEPS = (
    *VARIABLES["$parameters"], "x", "uri", "name", "length", "0", "1", "2", "3", "9", "01", "-1", "1.5", "", " ", ".",
)  # fmt: skip
INDICES = ("[0]", "[1]", "[2]", "[01]", "[9]", "[ 0 ]", "[-1]", "[a]", "[")
HEADS = ("$parameters", "$data", "$output", "$script", "parameters", "$secrets", ".", "text", "")
KINDS = ("", "", "", "", "", "", "", "", "#", "^", "/", "!", "&", ">")
AROUND = ("", " ", "  ", "\n", "a", "echo ", "$X ${Y}", "{{x}}", "%>", "<", "%", "\n  \n", "é")


def name(rng):
    parts = [rng.choice(HEADS)]
    for _ in range(rng.randint(0, 3)):
        parts.append(rng.choice(INDICES) if rng.random() < 0.3 else f".{rng.choice(STEPS)}")
    return "".join(parts)


def template(rng):
    text = ""
    for _ in range(rng.randint(1, 4)):
        kind, blank = rng.choice(KINDS), rng.choice(("", " ", "  "))
        inside = name(rng)
        tag = f"<%{kind}{blank}{inside}{blank}%>"
        if kind in ("#", "^") and rng.random() < 0.9:
            tag += f"{rng.choice(AROUND)}<%/{inside}%>"
        text += rng.choice(AROUND) + (tag if rng.random() < 0.98 else tag[:-1]) + rng.choice(AROUND)
    return text


def ours(text):
    try:
        return fill_at_submission(text, VARIABLES).text
    except TemplateInvalid:
        return None


def as_stored(text):
    """The text as the server stores it: UTF-8 replaces a lone half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_the_text_rendered_from_a_random_template_equals_the_output_of_mustache_js():
    rng = random.Random(1)
    templates = [template(rng) for _ in range(amount(1_500, 100_000))]
    document = {"variables": VARIABLES, "templates": templates}
    found = output_of(Path(__file__).with_name("mustache.js"), "mustache", document)
    theirs = [each if each is None else as_stored(each) for each in found]
    assert sum(each is not None for each in theirs) > len(theirs) / 2
    different = [
        (text, here, there)
        for text, there in zip(templates, theirs, strict=True)
        if (here := ours(text)) != there
    ]
    assert different[:5] == [], f"{len(different)} of {len(templates)} differ"
