"""The named statements of queries.sql."""

import re
from importlib import resources

_QUERY = re.compile(r"^-- name: (\w+) -- .+\n((?:(?!^-- name:).*\n?)*)", re.MULTILINE)


def sql_text(package: str, name: str) -> str:
    """The content of a .sql file of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def named_queries(package: str) -> dict[str, str]:
    """The statements of a package's queries.sql, by name."""
    return {name: statement.strip() for name, statement in _QUERY.findall(sql_text(package, "queries.sql"))}


QUERIES = named_queries(__package__)
