"""The documentation site: `make docs` makes it with Sphinx from the pages that the repository and `nnictl help` have anyway.

The README is the first page, and its tables are the order of the others. Docstrings become the API reference.
"""

import html
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import trial_keeper

project = "trial-keeper"
version = release = trial_keeper.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/site/*.md",
    "examples/**/README.md",
    "images/README.md",
    "proto/README.md",
]
exclude_patterns = [".*", "build", "node_modules", "manager", "tests"]

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
# Pygments knows no lexer of .gitignore.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["../../build/docs/static"]
html_additional_pages = {"index": "first_page.html"}
templates_path = ["templates"]
html_show_search_summary = False  # it fetches pages, which browsers refuse for files
html_show_copyright = html_show_sphinx = html_copy_source = False

_LINK = re.compile(r"\[([^]]*)\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
# A list of fields in the docstring of a class.
_FIELDS = re.compile(r"^[a-z_]+: ", re.M)


class Mermaid(SphinxDirective):
    """A diagram, which Mermaid draws in the browser."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The diagram's text in the element that Mermaid looks for."""
        text = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>', format="html")]


def prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to files that are no pages by their text. A link to nothing stays, and is an error of the build."""
    folder = Path(app.env.doc2path(page)).parent

    def replaced(link: re.Match[str]) -> str:
        path = folder / link[2]
        return link[1] if path.exists() and path.suffix != ".md" else link[0]

    source[0] = _LINK.sub(replaced, source[0])
    if page == root_doc:
        source[0] += "".join(map(_contents, re.split(r"^### ", source[0], flags=re.M)[1:]))


def _contents(section: str) -> str:
    """The entry in the site's menu for a section of the README with a table of pages."""
    title, _, text = section.partition("\n")
    pages = dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md\)", text))
    extra = ["docs/site/api"] if title == "Use" else []
    listed = "\n".join([*pages, *extra])
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```\n" if pages else ""


def add_mermaid(app: Sphinx, page: str, template: str, context: dict[str, str], tree: nodes.document) -> None:
    """Load Mermaid on pages with diagrams only: it has five megabytes."""
    if 'class="mermaid"' in context.get("body", ""):
        app.add_js_file("mermaid.min.js")


def prepare_docstring(
    app: Sphinx, what: str, name: str, documented: object, options: object, lines: list[str]
) -> None:
    """Make code of what is in single backticks. Of a class whose docstring lists its fields, keep what stands before the list."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines))
    lines[:] = (_FIELDS.split(text)[0] if what == "class" else text).split("\n")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_directive("mermaid", Mermaid)
    app.connect("source-read", prepare)
    app.connect("html-page-context", add_mermaid)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)  # before napoleon reads it
