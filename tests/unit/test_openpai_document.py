"""The text of a job is parsed like in OpenPAI, with line numbers, and in bounded time."""

import json
import time

import pytest
from deadlines import scaled_s
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.training_services.openpai.document import MAX_LEVELS, read_document
from nni_manager.training_services.openpai.job_checks import ProtocolDiagnostic, ProtocolInvalid, Violation


def refusal(text):
    with pytest.raises(ProtocolInvalid) as caught:
        read_document(text)
    return str(caught.value)


def read_or_refused(text):
    try:
        read_document(text)
    except ProtocolInvalid as error:
        return len(error.diagnostics) == 1 and error.diagnostics[0].line >= 1
    return True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{\n\t"a": 1\n}', {"a": 1}),
        ("a:\tb", {"a": "b"}),
        ("a: b\t# c", {"a": "b"}),
        ("a: x\ty \t z\t\n  w\nb\tc: 1\n", {"a": "x\ty \t z w", "b\tc": 1}),
        ("a: [x\ty,\tz\t]", {"a": ["x\ty", "z"]}),
        ("- a\n-\tb", ["a", "b"]),
        ("a: |\n  x:\ty\n  z", {"a": "x:\ty\nz\n"}),
        ("a: yes\nb: 1.0", {"a": "yes", "b": 1}),
        ("%YAML 1.1\n---\na: yes", {"a": "yes"}),
        ("1.0: a\nnull: b", {"1": "a", "null": "b"}),
        ("a: '1'\nb: !!str 1", {"a": "1", "b": "1"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ("\ufeffa: 1", {"a": 1}),
        ("a: <% $parameters.x %>", {"a": "<% $parameters.x %>"}),
        ("a: &x {c: 1}\nb: {<<: *x, d: 2}", {"a": {"c": 1}, "b": {"c": 1, "d": 2}}),
        ("a: {<<: [{x: 1}, {x: 2, y: 3}], y: 4}", {"a": {"x": 1, "y": 4}}),
        ("a: {y: 4, <<: {y: 5}}", {"a": {"y": 4}}),
        ('"<<": 1', {"<<": 1}),
        ("a: {<<: {x: 1}, <<: {x: 2, y: 3}}", {"a": {"x": 1, "y": 3}}),
        ("a: &base.image-1 x\nb: *base.image-1", {"a": "x", "b": "x"}),
        ("a: &x 1\nb: &x 2\nc: *x", {"a": 1, "b": 2, "c": 2}),
        ("a: [what?, ls *.?y, ?x]", {"a": ["what?", "ls *.?y", "?x"]}),
        (
            'a: [:8080, "b":1, c:, d :e]\nf: {g: :9}',
            {"a": [":8080", {"b": 1}, {"c": None}, "d :e"], "f": {"g": ":9"}},
        ),
        ("{a: 1, : 0}", {"a": 1, "null": 0}),
        ("a: {: 0}\nb: {:}\nc: {\n: 1}", {"a": {"null": 0}, "b": {"null": None}, "c": {"null": 1}}),
        ("a: [: 0, b, : 1]", {"a": [{"null": 0}, "b", {"null": 1}]}),
        ("a: {b : c, : {: 1},}", {"a": {"b": "c", "null": {"null": 1}}}),
        (
            "a: [-a, --, ?b, ::]\nb: {-: 1, ?: 2}",
            {"a": ["-a", "--", "?b", {":": None}], "b": {"-": 1, "?": 2}},
        ),
        ("a: x\r\nb: y\r\n", {"a": "x", "b": "y"}),
        ("", None),
        ("# nothing", None),
    ],
)
def test_a_job_text_is_parsed_to_the_value_that_js_yaml_returns(text, value):
    assert read_document(text).value == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1\n\tb: 2",
            "line 2, column 1: cannot read the job: a line begins with a tab; indent with spaces",
        ),
        ("a: 1\nb: 'x\nc: 2", "line 2, column 4: cannot read the job: a quote is not closed; close it"),
        (
            "a: b: c",
            "line 1, column 5: cannot read the job: the value in this line contains a colon and a space, which",
        ),
        (
            "a:\n  b c\n  d: 1",
            "line 2, column 3: cannot read the job: a line is not `key: value`; add a colon and a",
        ),
        (
            "a: 1\nb\n",
            "line 2, column 1: cannot read the job: a line is not `key: value`; add a colon and a value",
        ),
        (
            "a: 1\n---\nb: 1",
            "line 2, column 1: cannot read the job: a second document starts here, after ---; keep one",
        ),
        (
            "x: 1\ny: \x07",
            "line 2, column 4: cannot read the job: it contains an invalid character (code 7)",
        ),
        (
            "a: \ud800",
            "line 1, column 4: cannot read the job: it contains an invalid character (code 55296)",
        ),
        (
            'a: "\\ud83d"',
            "line 1, column 4: cannot read the job: half of a surrogate pair is not a character",
        ),
        ("a: *b", "line 1, column 4: cannot read the job: found undefined alias 'b'; fix the YAML there"),
        ("a: &a [*a]", "line 1, column 4: cannot read the job: an anchor contains itself"),
        (
            "a: !!python/object:os.system x",
            "line 1, column 4: cannot read the job: the tag !!python/obj",
        ),
        (
            "a: !!set {x}",
            "line 1, column 4: cannot read the job: the tag !!set is not supported here",
        ),
        (
            "a: !!int x",
            'line 1, column 4: cannot read the job: "x" is not of type !!int; remove the tag',
        ),
        ("[1]: a", "line 1, column 1: cannot read the job: a list or a mapping cannot be a key here"),
        ("a: {<<: 1}", "line 1, column 9: cannot read the job: << merges only mappings"),
        (
            "a: 9999-99-99",
            'line 1, column 4: cannot read the job: the date "9999-99-99" is out of range; put it in quotes',
        ),
        (
            "a: [-]",
            "line 1, column 5: cannot read the job: in brackets, a dash alone is not a value; put it in quotes",
        ),
        ("a: [b, - ]", "line 1, column 8: cannot read the job: "),
        (
            "a: {b: ?}",
            "line 1, column 8: cannot read the job: in brackets, a question mark alone is not a value; put it",
        ),
        ("a: {: : 1}", "line 1, column 7: cannot read the job: expected the node content, but found ':'"),
        ("a: {b: 1", "line 1, column 4: cannot read the job: expected ',' or '}'"),
    ],
)
def test_the_error_for_an_unreadable_text_contains_the_line_and_the_column(text, message):
    assert refusal(text).startswith(message)


def test_all_duplicate_keys_are_reported():
    document = read_document("a: 1\nb: {c: 1, c: 2}\na: 3\n", "job.yml")
    assert [str(error) for error in document.diagnostics] == [
        "job.yml:2:11: cannot use b.c: line 2 has the same key; keep one of the two",
        "job.yml:3:1: cannot use a: line 1 has the same key; keep one of the two",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_a_deeply_nested_job_text_is_rejected(opening):
    assert f"more than {MAX_LEVELS} levels" in refusal(opening * 3000)


def test_a_small_text_is_refused_if_its_aliases_expand_to_a_huge_value():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    started = time.monotonic()
    assert "its aliases expand to more than" in refusal("\n".join(lines))
    assert time.monotonic() - started < scaled_s(5)


def test_an_alias_has_the_value_of_its_anchor():
    document = read_document("a: &a [1, 2]\nb: *a\n")
    assert document.value == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["[" * 100_000, "a: " + "9" * 90_000, "a: 1:" + "0" * 90_000, "'" * 99_999, "&a " * 30_000]
)
def test_a_hostile_text_is_parsed_or_refused_in_bounded_time(text):
    started = time.monotonic()
    assert read_or_refused(text)
    assert time.monotonic() - started < scaled_s(20)


@given(st.text(alphabet="ab:-?[]{},&*!|>%@'\"#<~ \t\n019.", max_size=60))
def test_any_text_is_parsed_or_causes_an_error_that_contains_a_position(text):
    assert read_or_refused(text)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(codec="utf-8", categories=["L", "P", "Z"])),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text("abc.-"), values, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_json_documents_are_parsed_to_their_json_values(value):
    assert read_document(json.dumps(value)).value == value
    assert read_document(json.dumps(value, indent="\t")).value == value


def test_an_error_has_the_position_of_its_key_or_of_the_nearest_existing_parent():
    document = read_document("a:\n  - b: 1\n  - 2\n", "f")
    assert str(document.diagnostic(("a", 0, "b"), "m")) == "f:2:5: m"
    assert str(document.diagnostic(("a", 1), "m")) == "f:3:5: m"
    assert str(document.diagnostic(("a", 0, "x", "y"), "m")) == "f:2:5: m"
    assert str(document.diagnostic((), "m")) == "f:1:1: m"


def test_errors_are_listed_in_the_order_of_their_lines():
    later = ProtocolDiagnostic("", 9, 1, "b", "cannot b; do", ("b",))
    sooner = ProtocolDiagnostic(
        "",
        2,
        3,
        "a[0]",
        "cannot a; do",
        ("a", 0, "it's"),
        Violation("type", ("x", "type"), {"type": "string"}),
    )
    assert (
        str(ProtocolInvalid([later, sooner]))
        == "line 2, column 3: cannot a; do\nline 9, column 1: cannot b; do"
    )
    assert json.loads(ProtocolInvalid([later, sooner]).response_message()) == [
        {
            "keyword": "type",
            "dataPath": ".a[0]['it\\'s']",
            "schemaPath": "#/x/type",
            "params": {"type": "string"},
            "message": "line 2, column 3: cannot a; do",
        },
        {
            "keyword": "semantics",
            "dataPath": ".b",
            "schemaPath": "#",
            "params": {},
            "message": "line 9, column 1: cannot b; do",
        },
    ]
    assert ProtocolInvalid([later]).response_message() == "line 9, column 1: cannot b; do"
