"""An exported job equals the imported job, including unknown keys."""

import json
import math
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from openpai_jobs import JOB, a_job, text_of

from nni_manager.training_services.openpai.document import read_document
from nni_manager.training_services.openpai.export import (
    dumped,
    of_values,
    without_secrets,
)
from nni_manager.training_services.openpai.protocol import parse
from nni_manager.training_services.openpai.scalars import MAX_EXACT, Date

GOLDEN = sorted((Path(__file__).parents[1] / "golden/openpai/jobs").glob("*.yaml"))
GOOD = [path for path in GOLDEN if path.stem != "infiniband"]
TEXT = """\
# What a team wrote together.
protocolVersion: 2   # of the protocol
name: 'old'
type: job

prerequisites:
- &image {name: i, type: dockerimage, uri: "ubuntu:22.04"}
taskRoles:
  worker:
    # ours
    dockerImage: i
    resourcePerInstance: {cpu: 1, memoryMB: 0x400, gpu: 0}
    commands: # in order
      - |
        echo "two
        lines"
      - echo $X   # the second

    # kept
    instances: 1
secrets:
    a: "s3cret"
    'b': s3cret2
# behind
extras:
  unknown: {z: 1, y: [~, 1.0, 1e-4, yes]}
  submitFrom: submit-job-v2
"""


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_an_unchanged_job_is_exported_with_its_original_text(path):
    text = path.read_text()
    job = parse(text)
    assert job.document.text == text
    assert of_values(job.document.value) == job


SECRETIVE = {
    "block": TEXT,
    "comments": TEXT.replace("s3cret2", "s3cret2 # not s3cret3\n    # b: s3cret4\n\n    # s3cret5"),
    "comments at the end": TEXT.replace("extras:\n", "defaults:\n")
    .replace("secrets:", "extras:")
    .replace("    a: \"s3cret\"\n    'b': s3cret2\n", "    a: 1\n")
    + "secrets:\n  a: s3cret\n  # or s3cret2",
    "comment in a line": TEXT.replace(
        "secrets:\n    a: \"s3cret\"\n    'b': s3cret2", "secrets: {a: s3cret} # or s3cret2"
    ),
    "JSON": text_of(a_job(secrets={"a": "s3cret", "b": "s3cret2"})),
    "JSON in a line": json.dumps(a_job(secrets={"a": "s3cret", "b": ["s3cret2"]})),
    "quoted key": TEXT.replace("secrets:", '"secrets":'),
    "indented": "\n".join(f"  {line}" for line in TEXT.splitlines()),
    "flow": TEXT.replace("secrets:\n", "secrets: {")
    .replace("s3cret2", "s3cret2 }")
    .replace('"s3cret"', '"s3cret",'),
    "explicit key": TEXT.replace("secrets:\n", "? secrets\n:\n"),
    "multi-line value": TEXT.replace("s3cret2", "|\n      s3cret2\n\n      s3cret3\n"),
    "merged": TEXT.replace("secrets:", "<<: {secrets: {c: s3cret}}\nx-secrets:").replace(
        "x-secrets:\n    a: \"s3cret\"\n    'b': s3cret2\n", ""
    ),
}


@pytest.mark.parametrize("text", SECRETIVE.values(), ids=SECRETIVE)
def test_secrets_and_nothing_else_are_masked_in_any_layout_of_the_text(text):
    job = parse(text)
    masked = without_secrets(job)
    assert "s3cret" not in masked
    assert read_document(masked).value == {**job.document.value, "secrets": "******"}


def test_a_job_without_secrets_is_shown_unchanged():
    assert without_secrets(parse(text_of(a_job()))) == text_of(a_job())


@pytest.mark.parametrize(
    "text",
    [
        "yes", "No", "on", "y", "null", "~", "", "1", "1.0", "1e-4", "0o17", "017", "0x1F", "1:30", "1_000", ".5", "2020-01-01",
        "<<", "=", "- a", "a: b", "a #b", "#a", "*a", "&a", "!a", "%a", "@a", "`a", "[a", "{a", "a\tb", "a\n", "\na",
        "a\n\nb\n\n",        "  a", "a  ", "a\n b\n", " a\nb", "\x07", "\x7f", "\x85", "\u2028", "\ufeff", "\u00a0x",
        "😀", "true", "---", "...", "? a", "'", '"', "x" * 300, "a " * 100, "C:\\x", "<% $parameters.x %>",
    ],
)  # fmt: skip
def test_any_exported_text_value_is_parsed_back_unchanged(text):
    for value in ({"k": text}, [text], {text or "k": "v"}):
        assert read_document(dumped(value)).value == value
        # OpenPAI's runtime parses jobs with PyYAML, so PyYAML must read the same value.
        assert yaml.safe_load(dumped(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        MAX_EXACT,
        0.1,
        1e-7,
        1e21,
        1.5e300,
        math.inf,
        -math.inf,
        True,
        False,
        None,
        [],
        {},
        [[]],
        {"a": {}},
    ],
)
def test_any_exported_value_is_parsed_back_unchanged(value):
    assert read_document(dumped({"k": value})).value == {"k": value}
    assert yaml.safe_load(dumped({"k": value})) == {"k": value}


def test_an_exported_date_is_parsed_back_as_a_date():
    moment = Date(datetime(2020, 1, 2, 3, 4, 5, 678000, tzinfo=timezone.utc))
    assert read_document(dumped({"k": moment})).value == {"k": moment}


text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-MAX_EXACT, MAX_EXACT) | st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda number: not (abs(number) <= MAX_EXACT and number.is_integer())
)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)
names = st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)
commands = st.lists(text, min_size=1, max_size=3)
roles = st.fixed_dictionaries(
    {
        "dockerImage": st.just("i"),
        "resourcePerInstance": st.fixed_dictionaries(
            {"cpu": st.integers(0, 9), "memoryMB": st.integers(0, 9999), "gpu": st.integers(0, 9)},
            optional={
                "ports": st.dictionaries(st.sampled_from(["a", "_b", "c1"]), st.integers(0, 5), min_size=1)
            },
        ),
        "commands": commands,
    },
    optional={
        "instances": st.integers(1, 10_000),
        "completion": st.fixed_dictionaries(
            {}, optional={"minFailedInstances": st.none() | st.integers(-1, 9)}
        ),
        "taskRetryCount": st.integers(-5, 5),
        "prerequisites": st.lists(st.sampled_from(["i", "d", "s", "o"]), max_size=3),
        "data": st.just("d"),
    },
)
jobs = st.fixed_dictionaries(
    {
        "protocolVersion": st.sampled_from([2, "2"]),
        "name": names,
        "type": st.just("job"),
        "prerequisites": st.just(JOB["prerequisites"]),
        "taskRoles": st.dictionaries(st.sampled_from(["worker", "PS", "_x1", "b_2"]), roles, min_size=1),
    },
    optional={
        "version": text | numbers,
        "description": text,
        "parameters": st.dictionaries(text, values, max_size=3),
        "secrets": st.dictionaries(text, values, max_size=3),
        "jobRetryCount": st.integers(0, 9),
        "defaults": st.dictionaries(st.sampled_from(["virtualCluster", "other"]), text),
        "extras": st.dictionaries(st.sampled_from(["submitFrom", "other", "gangAllocation"]), values),
    },
)


@pytest.mark.slow
@given(jobs)
def test_an_exported_job_is_imported_unchanged(values):
    job = of_values(values)
    assert job.document.value == values
    assert parse(job.document.text) == job
    assert parse(json.dumps(values)) == job


@pytest.mark.slow
@given(jobs)
def test_a_masked_text_contains_no_secret(values):
    values = {**values, "secrets": {"k": "Zs3cretZ", "l": ["Zs3cretZ", {"m": "Zs3cretZ"}]}}
    for job in (of_values(values), parse(json.dumps(values))):
        assert "Zs3cretZ" not in without_secrets(job)
