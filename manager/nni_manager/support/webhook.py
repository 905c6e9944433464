"""A POST of JSON to an address of the user."""

import requests
from urllib3.exceptions import LocationParseError

_TIMEOUT_S = 10.0


def post_json(url: str, body: str) -> int:
    """Post the JSON text; returns the HTTP status, without the response's body.

    Raises:
        requests.RequestException: there is no response. Its text contains the URL.
    """
    headers = {"Content-Type": "application/json"}
    data = body.encode()
    try:
        with requests.post(url, data=data, headers=headers, timeout=_TIMEOUT_S, stream=True) as response:
            return response.status_code
    except (LocationParseError, UnicodeError) as error:
        # requests checks the host's name only in part: an empty or a long label between dots is found later.
        raise requests.exceptions.InvalidURL(error) from error
