"""Signatures of the documents that a keeper writes in the workspace.

The key is the job's token, which only the job's keepers and the manager have. A signature is the HMAC-SHA256 of the other fields,
as JSON with sorted keys. A third party with write access to shared storage can neither forge a document nor move one to another
place: each document names its trial, its attempt and its task.
"""

import json
from collections.abc import Mapping
from typing import Any

FIELD = "signature"


class DocumentInvalid(ValueError):
    """A document in the workspace lacks a field or has an invalid one."""


class SignatureInvalid(DocumentInvalid):
    """A document was not signed with the token of its job."""


def signed(kind: str, document: Mapping[str, Any], token: str) -> dict[str, Any]:
    """Return the document with its signature. `kind`: the document's name, so that no signature is valid for another kind."""
    return {**document, FIELD: _signature_of(kind, document, token)}


def check_signature(kind: str, document: Mapping[str, Any], token: str) -> None:
    """Verify the signature of a document, in constant time.

    Raises:
        SignatureInvalid: the signature is missing, or does not match the token and these fields.
    """
    import hmac  # not at the top: loading OpenSSL takes 5 ms, and few importers need it

    rest = {name: value for name, value in document.items() if name != FIELD}
    given = document.get(FIELD)
    try:
        expected = _signature_of(kind, rest, token)
    except RecursionError:  # json.loads parses slightly deeper lists than json.dumps writes
        expected = ""
    if (
        not expected
        or not isinstance(given, str)
        or not hmac.compare_digest(given.encode(errors="replace"), expected.encode())
    ):
        raise SignatureInvalid(f"{kind} was not signed with the token of its job")


def _signature_of(kind: str, document: Mapping[str, Any], token: str) -> str:
    import hmac

    text = json.dumps(document, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hmac.new(token.encode(), f"{kind}\n{text}".encode(), "sha256").hexdigest()
