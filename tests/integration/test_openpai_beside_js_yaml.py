"""This project and js-yaml, which OpenPAI's server uses, parse the same generated job texts.

Only texts whose value is a mapping are compared, because a job is a mapping. `docs/openpai-jobs.md` lists the differences.
"""

import math
import random
import re
from pathlib import Path

import pytest
from amounts import amount
from node_program import output_of

from nni_manager.training_services.openpai.document import read_document
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.scalars import Date

pytestmark = pytest.mark.timeout(amount(120, 1200))

# js-yaml accepts these kinds of texts, and the manager's parser refuses them. Each pattern matches the error of the manager's
# parser.
REFUSED_HERE = {
    "a key after a question mark that is a list, a mapping, a merge or nothing, or that follows a value in its line": (
        "mapping keys are not allowed here|a list or a mapping cannot be a key|<< merges only mappings"
        "|contains a colon and a space, which YAML reads as another key"
    ),
    "a comma without a value": "expected the node content, but found ','",
    "a tab that indents, or after a tag or the sign of a block scalar": (
        r"a line begins with a tab|expected (' '|chomping or indentation indicators), but found '\\t'"
    ),
    "a second entry in the line of a quoted value or a bracket": (
        "text follows a closing quote or bracket|found '<(anchor|tag)>'"
    ),
    "an entry of a list that is indented more than the one before": "found '<block sequence start>'",
    "a tag without a name, or of another type than its empty text": (
        'a line is not `key: value`|expected URI|the tag !.* is not supported|"" is not of type'
    ),
    "an anchor in its own value": "an anchor contains itself",
    "a directive without a name": "expected alphabetic or numeric character|expected '<document start>'",
}
# js-yaml refuses these kinds of texts, and the manager's parser accepts them. Each pattern matches the error of js-yaml.
REFUSED_THERE = {
    "an anchor or a tag before a key, and a block scalar without indentation": (
        "end of the stream or a document separator is expected|bad indentation of a mapping entry"
        "|cannot resolve a node with !<tag:yaml.org,2002:int> explicit tag|duplication of an anchor property"
    ),
    "a line in brackets that continues a text without indentation": "missed comma between flow collection entries",
    "the end of a document, twice": "expected a single document",
    "<< with nothing": "the provided source object is unacceptable",
}
# Both parsers accept these kinds of texts, but read different values. There is no error, so each pattern matches the text itself.
READ_DIFFERENTLY = {
    "what follows an entry of a list without a value, indented less: js-yaml adds it to that entry's list": (
        r"-[ ]*(#.*)?\n(\s|#.*\n)*-"
    ),
    "a tag before a line feed or without a name: for js-yaml a text follows": r"!(!str)?\s",
    "an anchor without a value in its line: for js-yaml it is an empty list": r"&x\s*(#.*)?\n",
    "a blank before a line feed in quotes": r"[\"'][^\n]*[ ]\n",
}

SCALARS = (
    *(
        "a",
        "b",
        "c",
        "1",
        "1.0",
        "017",
        "0x1F",
        "0b11",
        "0o17",
        "1:30",
        "1_000",
        "1e-4",
        "-3",
        ".5",
        ".inf",
        ".nan",
    ),
    *(
        "yes",
        "no",
        "true",
        "False",
        "null",
        "~",
        "",
        "2020-01-01",
        "2020-1-2T3:04:05.678+9",
        "a b",
        "a:b",
        "a#b",
        "/a",
    ),
    *(
        "'x'",
        "''",
        "'it''s'",
        '"x"',
        '"\\n\\x41\\u00e9"',
        "$HOME",
        "a, b",
        "-a",
        "?a",
        ":a",
        ":80",
        "-1:30",
        "é",
        "<% $x.y %>",
    ),
)
TOKENS = (
    *(
        "a",
        "b",
        "1",
        "x y",
        "null",
        "'x'",
        '"y"',
        ": ",
        ":",
        "- ",
        "-",
        "? ",
        "?",
        ", ",
        ",",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        "\n",
        "\n  ",
        "\n    ",
        " ",
        "  ",
        "&x ",
        "*x",
        "!!str ",
        "!!int ",
        "!",
        "'",
        '"',
        "|\n",
        ">\n",
        "|-\n",
        ">+2\n",
    ),
    *("# c", " # c", "<<", "<<: *x", "\t", "%", "@", "`", "\n---\n", "\n...\n", "\\", "=", "é"),
)


def block(rng, depth, indent):
    """The lines of a random mapping or list."""
    pad, lines = " " * indent, []
    is_list = depth > 0 and rng.random() < 0.35
    for number in range(rng.randint(1, 4)):
        head = "-" if is_list else f"{key(rng, number)}:"
        kind = rng.random()
        if kind < 0.3 and depth < 4:
            deeper = indent if not is_list and rng.random() < 0.2 else indent + rng.randint(1, 4)
            child = block(rng, depth + 1, deeper)
            if deeper == indent and not child[0].lstrip().startswith("-"):
                child = [f"  {line}" for line in child]
            lines += [pad + head, *child]
        elif kind < 0.45:
            style = rng.choice("|>") + rng.choice(("", "-", "+"))
            inner = " " * (indent + rng.randint(1, 4))
            words = [
                rng.choice(("x", "y: z", "- q", "# no", "", "  deeper")) for _ in range(rng.randint(0, 4))
            ]
            lines += [f"{pad}{head} {style}", *(inner + word if word else "" for word in words)]
        else:
            lines.append(f"{pad}{head} {flow(rng, 0)}")
        if rng.random() < 0.1:
            lines[-1] += rng.choice(("  # comment", "\n\n", f"\n{pad}# comment"))
    return lines


def key(rng, number):
    """A random key, which is rarely equal to the key of an adjacent entry."""
    if rng.random() < 0.03:
        return "<<"
    return rng.choice((f"k{number}", f"k{number}", f"k{number}", f'"k{number}"', *SCALARS))


def flow(rng, depth):
    """A random value on one line."""
    kind = rng.random()
    gap = rng.choice(("", " "))
    if kind < 0.15 and depth < 3:
        return f"[{gap}{f',{gap}'.join(flow(rng, depth + 1) for _ in range(rng.randint(0, 3)))}{gap}]"
    if kind < 0.3 and depth < 3:
        entries = [f"{key(rng, number)}: {flow(rng, depth + 1)}" for number in range(rng.randint(0, 3))]
        return f"{{{gap}{f',{gap}'.join(entries)}{gap}}}"
    if kind < 0.36:
        return rng.choice(("&x 1", "&x {p: 1}", "&x {p: 2, q: 3}", "*x", "*x", "[*x, {p: 4}]"))
    if kind < 0.4 and depth > 0:
        return rng.choice(("", "-", "?", ":", ": 1", "'x':1", "a: b"))
    return rng.choice(SCALARS)


def damaged(rng, text):
    """The text with some tokens removed, inserted or exchanged."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(("", rng.choice(TOKENS))) + text[at + rng.randint(0, 2) :]
    return text


def generated(rng):
    match rng.randrange(4):
        case 0:
            return "".join(rng.choice(TOKENS) for _ in range(rng.randint(1, 12)))
        case 1:
            return "a: " + "".join(rng.choice(TOKENS) for _ in range(rng.randint(1, 8)))
        case 2:
            return "\n".join(block(rng, 0, 0)) + rng.choice(("", "\n"))
        case _:
            return damaged(rng, "\n".join(block(rng, 0, 0)))


def encoded(value):
    """The value, in the format that js_yaml.js uses to print values."""
    match value:
        case dict():
            return {"$map": {name: encoded(each) for name, each in value.items()}}
        case list():
            return [encoded(each) for each in value]
        case Date():
            return {"$date": value.at.timestamp() * 1000}
        case float() if math.isnan(value):
            return {"$number": "NaN"}
        case float() if math.isinf(value):
            return {"$number": "Infinity" if value > 0 else "-Infinity"}
        case _:
            return value


def theirs(texts):
    return output_of(Path(__file__).with_name("js_yaml.js"), "js-yaml", texts, object_hook=_with_keys)


def _with_keys(found):
    return {"$map": dict(found["$map"])} if "$map" in found else found


def ours(text):
    try:
        read = read_document(text)
    except ProtocolInvalid as error:
        return {"refused": error.diagnostics[0].message}
    if read.diagnostics:
        return {"refused": read.diagnostics[0].message}
    return {"value": encoded(read.value)}


def is_mapping(read):
    return isinstance(read.get("value"), dict) and "$map" in read["value"]


def is_known(text, here, there):
    """True if one of the lists above contains the difference."""
    read_as = (
        (text, READ_DIFFERENTLY),
        (here.get("refused", ""), REFUSED_HERE),
        (there.get("refused", ""), REFUSED_THERE),
    )
    return any(re.search(pattern, found) for found, known in read_as for pattern in known.values())


def test_a_job_text_has_the_same_value_as_in_js_yaml_except_for_known_differences():
    rng = random.Random(1)
    texts = [generated(rng) for _ in range(amount(6_000, 200_000))]
    results = [(text, ours(text), there) for text, there in zip(texts, theirs(texts), strict=True)]
    jobs = [result for result in results if is_mapping(result[1]) or is_mapping(result[2])]
    different = [result for result in jobs if result[1] != result[2]]
    print(f"{len(texts)} texts, {len(jobs)} mappings, {len(different)} read differently")
    assert len(jobs) > len(texts) // 4
    new = [result for result in different if not is_known(*result)]
    assert not new, "\n".join(
        f"{text!r}\n  here: {here}\n  js-yaml: {there}" for text, here, there in sorted(new, key=str)[:20]
    )
