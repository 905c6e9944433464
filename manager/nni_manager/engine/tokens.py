"""Authentication tokens, derived from the experiment's secret: a restart of the manager does not change them."""

import hashlib
import hmac

# Job ids contain no spaces, so this name cannot be a job id.
_API = "the HTTP API"


def token_of(secret: bytes, job_id: str) -> str:
    """The token that authenticates the keepers of one job, and of no other job."""
    return hmac.new(secret, job_id.encode(), hashlib.sha256).hexdigest()


def api_token_of(secret: bytes) -> str:
    """The token that authenticates programs of the experiment's owner."""
    return token_of(secret, _API)


def is_token(given: bytes, right: str) -> bool:
    """True if both are equal. Compares in constant time."""
    return hmac.compare_digest(given, right.encode())
