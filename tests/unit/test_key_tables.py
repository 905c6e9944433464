"""The key tables in the documentation are generated from the key declarations. `make golden` writes them.

A table stands between `<!-- keys on PLATFORM: KEYS -->` and `<!-- end of keys -->`. KEYS are keys of NNI's first schema.
`tuner.*` selects all keys of `tuner`, and `*` all top-level keys.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nni_manager.config.diagnostics import key_of
from nni_manager.config.dialect import EACH, SERVICE, Keys
from nni_manager.config.keys import keys_on
from nni_manager.config.platforms import PLATFORMS
from nni_manager.config.schema import Key, example_of

DOCS = Path(__file__).parents[2] / "docs"
TABLE = re.compile(r"<!-- keys on (?P<platform>\w+): (?P<keys>.+) -->\n(?P<rows>[^<]*)<!-- end of keys -->\n")
PAGES = sorted(page.name for page in DOCS.glob("*.md") if "<!-- keys on " in page.read_text())
HEAD = ["| Key | In NNI's second schema | Value | Description | Default |", "|---|---|---|---|---|"]


def chosen(platform: str, words: str) -> Iterator[tuple[Key, str]]:
    """The keys of a table, each with its name in the first schema. The names omit the section of the table."""
    keys = keys_on(platform)
    for word in words.split():
        section, all_of = word.removesuffix(EACH).rstrip("."), word.endswith(EACH)
        above: Keys = tuple(section.split(".")) if section else ()
        homes = {key.path for key in keys if above in key.v1 and key.is_mapping} if above else {()}
        for key in keys:
            if not all_of:
                if above in key.v1:
                    yield key, section
            elif not key.v1 and any(key.path[:-1] == home for home in homes):
                yield key, ""
            else:
                names = [each[len(above) :] for each in key.v1 if each[: len(above)] == above]
                if names and names[0] and EACH not in names[0] and (above or len(names[0]) == 1):
                    yield key, ", ".join(f"`{key_of(name)}`" for name in names).strip("`")


def row(key: Key, v1: str) -> str:
    declared = key.declared
    # The path of a key of a task role contains the name or the index of the role. The table shows only the part after it, because
    # all roles have the same keys.
    is_of_role = key.path[:1] == SERVICE and key.path[1:2] != ("storage",) and len(key.path) > 2
    v2 = key_of(key.path[2 + (EACH in key.path) :] if is_of_role else key.path)
    about = declared.about + (f" (since {declared.since}, not in NNI)" if declared.since else "")
    has_example = declared.kind in ("duration", "gpus") or "list" in declared.what
    cells = (
        f"`{v1}`" if v1 else "–",
        "–" if declared.only_v1 else f"`{v2}`",
        declared.what + (f", such as `{example_of(key.field)}`" if has_example else ""),
        about,
        declared.unset or default(key),
    )
    return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"


def default(key: Key) -> str:
    if key.field.is_required():
        return "required"
    value = key.field.default
    if value is None or value in ("", []):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(found: re.Match[str]) -> str:
    rows = [row(*each) for each in chosen(found["platform"], found["keys"])]
    assert rows, found[0]
    return "\n".join(
        (found[0].partition("\n")[0], "", *HEAD, *dict.fromkeys(rows), "", "<!-- end of keys -->\n")
    )


@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_has_the_key_tables_generated_from_the_declarations(page: str) -> None:
    written = (DOCS / page).read_text()
    generated = TABLE.sub(table, written)
    if os.environ.get("GOLDEN") == "write":
        (DOCS / page).write_text(generated)
    else:
        assert written == generated, "run `make golden` after a change of a key"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_key_is_declared_with_a_description_and_is_in_a_table(platform: str) -> None:
    listed = {
        (key.path[-1], key.declared)
        for page in PAGES
        for found in TABLE.finditer((DOCS / page).read_text())
        for key, _ in chosen(found["platform"], found["keys"])
    }
    for key in keys_on(platform):
        assert key.declared.about, key.path
        # The tables omit two kinds of entries: the sections of a platform, which are headings, and the keys "without effect".
        is_heading = key.path in (SERVICE, (*SERVICE, "storage")) or key.declared.about.startswith(
            "without effect: "
        )
        assert is_heading or (key.path[-1], key.declared) in listed, key.path
