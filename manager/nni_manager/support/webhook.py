"""A POST of JSON to an address of the user."""

import requests

_TIMEOUT_S = 10.0


def post_json(url: str, body: str) -> int:
    """Post the JSON text; returns the HTTP status, without the response's body.

    Raises:
        requests.RequestException: there is no response. Its text contains the URL.
    """
    headers = {"Content-Type": "application/json"}
    with requests.post(url, data=body.encode(), headers=headers, timeout=_TIMEOUT_S, stream=True) as response:
        return response.status_code
