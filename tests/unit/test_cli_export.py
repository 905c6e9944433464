"""nnictl experiment export: the records in JSON and CSV."""

import csv
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.cli.experiment_commands import to_csv, to_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def a_record(trial_id="aB3dE", value=0.5, **parameters):
    return {"trialJobId": trial_id, "parameter": parameters, "value": value}


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_json_export_writes_one_record_per_line_and_null_for_numbers_that_are_not_finite():
    records = [a_record(value=math.nan, lr=0.1), a_record("x", {"default": 1, "loss": math.inf})]
    text = to_json(records)
    assert len(text.splitlines()) == 4
    assert json.loads(text, parse_constant=lambda word: word) == [
        a_record(value=None, lr=0.1),
        a_record("x", {"default": 1, "loss": None}),
    ]
    assert to_json([]) == "[]\n"


def test_csv_export_has_a_column_for_every_parameter_including_nested_parameters():
    text = to_csv(
        [a_record(lr=0.1, net={"_name": "conv", "size": 3}), a_record("x", 1, net={"_name": "none"})]
    )
    assert text == (
        "trialJobId,lr,net/_name,net/size,value\r\n"
        "aB3dE,0.1,conv,3,0.5\r\n"
        "x,,none,,1\r\n"
    )  # fmt: skip


def test_the_csv_value_of_a_dict_result_is_its_default_entry():
    rows = table(to_csv([a_record(value={"default": 0.9, "loss": 1}), a_record("x", 0.5)]))
    assert [(row["value"], row["value/loss"]) for row in rows] == [("0.9", "1"), ("0.5", "")]


def test_a_parameter_column_gets_a_prefix_if_the_parameter_has_the_name_of_a_fixed_column():
    (row,) = table(to_csv([a_record(value=2, trialJobId="t", intermediate=[1])]))
    assert row == {
        "trialJobId": "aB3dE",
        "parameter/trialJobId": "t",
        "parameter/intermediate": "[1]",
        "value": "2",
    }
    (row,) = table(to_csv([{"trialJobId": "a", "parameter": {"value": 1}, "value": 2}]))
    assert row == {"trialJobId": "a", "parameter/value": "1", "value": "2"}


def test_csv_export_writes_intermediate_results_as_a_list_in_one_cell():
    (row,) = table(to_csv([a_record() | {"intermediate": [0.1, math.nan, {"default": 1}]}]))
    assert row["intermediate"] == '[0.1, NaN, {"default": 1}]'


@given(st.lists(st.dictionaries(st.text(min_size=1), SCALARS, max_size=4), max_size=5))
def test_any_parameter_value_can_be_read_back_from_its_csv_column(spaces):
    records = [
        a_record(f"t{n}", n, **{f"p{name}": each for name, each in space.items()})
        for n, space in enumerate(spaces)
    ]
    rows = list(csv.reader(io.StringIO(to_csv(records), newline="")))
    assert len(rows) == len(records) + 1
    for record, row in zip(records, rows[1:], strict=True):
        found = dict(zip(rows[0], row, strict=True))
        for name, value in record["parameter"].items():
            assert found[name] == (value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("kind", ["json", "csv", "html"])
def test_the_error_of_an_export_to_a_full_disk_names_the_file(nnictl, an_experiment, kind):
    an_experiment("abc11111")
    code, out, err = nnictl("experiment", "export", "abc11111", "--type", kind, "--filename", "/dev/full")
    assert (code, out) == (1, "")
    assert (
        err.splitlines()[-1] == "ERROR: cannot use /dev/full: No space left on device; fix that and try again"
    )
