"""What lets somebody in: made from the experiment's secret, so that it outlives the manager and nothing more has to be kept."""

import hashlib
import hmac

# No id of a job has a space.
_API = "the HTTP API"


def token_of(secret: bytes, job_id: str) -> str:
    """What proves that a keeper speaks for a job. It says nothing about other jobs."""
    return hmac.new(secret, job_id.encode(), hashlib.sha256).hexdigest()


def api_token_of(secret: bytes) -> str:
    """What proves that a program acts for the experiment's owner."""
    return token_of(secret, _API)


def is_token(given: bytes, right: str) -> bool:
    """Whether they are the same. Takes as long whatever is wrong with the given one."""
    return hmac.compare_digest(given, right.encode())
