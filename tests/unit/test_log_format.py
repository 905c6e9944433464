"""The formats of a service's log."""

import json
import logging
import sys

import pytest

from nni_manager.support.log_format import formatter


def record(message, *arguments, exception=None):
    made = logging.LogRecord("nni_manager.engine", logging.WARNING, "", 0, message, arguments, exception)
    made.created = 1_795_000_000.25
    return made


def test_a_json_line_contains_time_and_level_and_logger_and_message():
    assert json.loads(formatter("json").format(record("cannot read %s", "ü\n\udc80"))) == {
        "timestamp": "2026-11-18T11:06:40.250Z",
        "level": "WARNING",
        "logger": "nni_manager.engine",
        "message": "cannot read ü\n\udc80",
    }


@pytest.mark.parametrize("name", ["text", "json"])
def test_a_formatted_log_line_contains_the_exception(name):
    try:
        json.loads("")
    except ValueError:
        text = formatter(name).format(record("failed", exception=sys.exc_info()))
    assert "JSONDecodeError: Expecting value" in text
    assert (text.count("\n") == 0) == (name == "json")
