"""Validators of JSON Schema, imported without the one check of a format that is slow to import.

If rfc3987_syntax is installed, as Jupyter and other packages want it, jsonschema imports it, and it compiles grammars for two
seconds. No schema here checks formats.
"""

import sys

_SLOW = "rfc3987_syntax"
_was_imported = _SLOW in sys.modules

if not _was_imported:
    sys.modules[_SLOW] = None  # type: ignore[assignment]  # Python's way to make an import fail
try:
    from jsonschema import Draft7Validator, Draft202012Validator, ValidationError
finally:
    if not _was_imported:
        del sys.modules[_SLOW]

__all__ = ["Draft7Validator", "Draft202012Validator", "ValidationError"]
