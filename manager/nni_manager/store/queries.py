"""The named statements of queries.sql."""

import re
from importlib import resources

_QUERY = re.compile(r"^-- name: (\w+) -- .+\n((?:(?!^-- name:).*\n?)*)", re.MULTILINE)


def sql_text(name: str) -> str:
    """The content of a .sql file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


QUERIES = {name: statement.strip() for name, statement in _QUERY.findall(sql_text("queries.sql"))}
