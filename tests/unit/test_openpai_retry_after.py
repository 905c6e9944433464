"""The Retry-After header of OpenPAI, relative to the clock of the OpenPAI server."""

import pytest
import requests

from nni_manager.training_services.openpai.connection import _retry_after_s

THEN, LATER = "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:30 GMT"


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "7"}, 7.0),
        # Both dates are years before the time of the local clock, so the local clock must not affect the wait.
        ({"Retry-After": LATER, "Date": THEN}, 30.0),
        ({"Retry-After": THEN, "Date": LATER}, 0.0),
        ({"Retry-After": LATER}, None),
        ({"Retry-After": "soon", "Date": THEN}, None),
        ({}, None),
    ],
)
def test_a_retry_date_is_relative_to_the_date_header_of_the_response(headers, wait_s):
    answer = requests.Response()
    answer.headers.update(headers)
    assert _retry_after_s(answer) == wait_s
