"""Templates are expanded in two stages with the same result as in OpenPAI, but without OpenPAI's bugs."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.training_services.openpai.templates import (
    TemplateInvalid,
    fill_at_submission,
    fill_parameter,
    fill_secrets,
)

# The file contains the output of mustache.js 2.3.2, called with OpenPAI's loop over its tokens. None represents an error.
MUSTACHE = json.loads((Path(__file__).parents[1] / "golden/openpai/mustache.json").read_text())


@pytest.mark.parametrize(("template", "text"), MUSTACHE["rows"], ids=[row[0] for row in MUSTACHE["rows"]])
def test_the_expansion_at_submission_equals_the_output_of_mustache(template, text):
    if text is None:
        with pytest.raises(TemplateInvalid, match=r"; \w+"):
            fill_at_submission(template, MUSTACHE["variables"])
    else:
        assert fill_at_submission(template, MUSTACHE["variables"]).text == text


def test_undefined_names_are_reported_except_for_secrets():
    filled = fill_at_submission(
        "<%$parameters.x[1]%> <% $secrets.t %> <% $deployment %>", {"$parameters": {"x": [0]}}
    )
    assert filled.text == "<% $parameters.x.1 %> <% $secrets.t %> <% $deployment %>"
    assert filled.unknown == ("$parameters.x.1", "$deployment")


def test_the_error_for_an_invalid_template_contains_the_position_of_the_tag():
    with pytest.raises(TemplateInvalid) as caught:
        fill_at_submission("echo 1\necho <% $parameters.x", {})
    assert caught.value.index == 12
    assert caught.value.problem == "<% is not closed; write %> after the name"


@pytest.mark.parametrize("name", ["toString", "constructor", "__class__", "01", "-1"])
def test_a_template_name_is_undefined_if_it_is_a_javascript_method_or_has_an_invalid_index(name):
    variables = {"$parameters": {"a": "text", "l": [1]}}
    for template in (
        f"<% $parameters.{name} %>",
        f"<% $parameters.a.{name} %>",
        f"<% $parameters.l.{name} %>",
    ):
        assert fill_at_submission(template, variables).text == template


def test_secrets_are_inserted_unescaped():
    secrets = {"p": "a&b\"c'd<e>", "n": None, "f": False, "i": 1, "x": 1e-7, "l": ["a", "b"]}
    names = ("p", "n", "f", "i", "x", "l.1", "l[0]")
    text = " ".join(f"<% $secrets.{name} %>" for name in names)
    assert fill_secrets(text, secrets).text == "a&b\"c'd<e> None False 1 1e-07 b a"


def test_an_undefined_secret_stays_as_text_and_is_reported():
    filled = fill_secrets("<% $secrets.a %> <% $secrets.b %> <% $parameters.x %> <% #s %>", {"a": 1})
    assert filled.text == "1 <% $secrets.b %> <% $parameters.x %> <% #s %>"
    assert filled.unknown == ("$secrets.b",)


def test_a_secret_reference_inside_a_parameter_is_replaced_in_the_second_stage():
    first = fill_at_submission(
        "curl <% $parameters.url %>", {"$parameters": {"url": "http://<% $secrets.t %>@host"}}
    )
    assert fill_secrets(first.text, {"t": "tok"}).text == "curl http://tok@host"


def test_plugin_parameters_may_refer_to_parameters_and_secrets():
    variables = {
        "$parameters": {"n": 1, "f": False, "l": [{"x": 5}], "o": {}, "z": None},
        "$secrets": {"t": "&"},
    }
    text = "<%$parameters.n%><% $parameters.f %><% $parameters.l[ 0 ].x %><% $secrets.t %>"
    assert fill_parameter(text, variables).text == "1false5&"
    for name in ("$parameters.o", "$parameters.l", "$parameters.z", "$parameters.q", "$output.uri"):
        assert fill_parameter(f"<% {name} %>", variables).unknown == (name,)


@given(st.text(alphabet="<%> \n\t#/^!&{}=>$sx.a[0]", max_size=40))
def test_any_template_text_is_expanded_or_refused_without_a_crash(text):
    assert filled_or_refused(text)


def filled_or_refused(text):
    try:
        filled = fill_at_submission(text, {"$x": {"a": [1]}, "$s": "v"})
    except TemplateInvalid as error:
        return 0 <= error.index < len(text)
    return isinstance(fill_secrets(filled.text, {}).text, str)


@given(st.text(max_size=30).filter(lambda text: "<%" not in text))
def test_a_text_without_tags_is_trimmed_but_otherwise_unchanged(text):
    assert fill_at_submission(text, {}).text == text.strip()
    assert fill_secrets(text, {"a": 1}).text == text


BLANKS = 100_000
FAST_S = 5  # An implementation in quadratic time would take minutes.


@pytest.mark.parametrize(
    "text",
    [
        " " * BLANKS,
        "<%" + " " * BLANKS,
        "<% $a" + " " * BLANKS,
        "<% $secrets" + " " * BLANKS,
        "<% $secrets.a" + " " * BLANKS + "%>",
        "<% $a.b" + " " * BLANKS + "% >",
        "<% {$a" + " " * BLANKS + "}%",
        "<%" * BLANKS,
        "<% $a " * BLANKS,
        "<% $secrets " * BLANKS,
        "<% $a[" * BLANKS + "%>",
        "<% $a[" + " " * BLANKS + "0] %>",
        "<% $a" + ".b" * BLANKS + " %>",
        "<% $a." + "9" * BLANKS + " %>",
        "\n" * BLANKS + "<% # %>",
    ],
    ids=lambda text: repr(text[:14]),
)
def test_the_time_to_expand_a_template_grows_linearly_with_its_length(text):
    started_s = time.process_time()
    for fill in (fill_at_submission, fill_secrets, fill_parameter):
        with contextlib.suppress(TemplateInvalid):
            fill(text, {"$a": ["x"], "$secrets": {"a": "x"}})
    assert time.process_time() - started_s < FAST_S


@given(st.text(alphabet="<%> \n$ax.0[]s", max_size=30) | st.text(alphabet="<%> $a", max_size=60))
def test_the_template_scanner_finds_the_same_references_as_a_regular_expression(text):
    # The regular expression is correct but slow: it is the reference implementation.
    pattern = re.compile(r"<%\s*(?P<name>\$[\s\S]*?)\s*%>")
    values = {"$a": "1", "$ax": "2"}
    by_pattern = pattern.sub(lambda match: values.get(match["name"], match[0]), text)
    assert fill_parameter(text, values).text == by_pattern
    assert list(fill_parameter(text, {}).unknown) == [match["name"] for match in pattern.finditer(text)]
