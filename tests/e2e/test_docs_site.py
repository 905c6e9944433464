"""The documentation site, built from a small set of pages with the project's own configuration."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = """# trial-keeper

## Where to read on

### Use

| Page | Content |
|---|---|
| [docs/tuners.md](docs/tuners.md) | which tuner to choose |
"""
TUNERS = """# Tuners

Read [the code](../scripts/a.py), [the folder](../scripts) and [the first page](../README.md#use).

```mermaid
stateDiagram-v2
  WAITING --> RUNNING
```
"""


@pytest.fixture
def build(tmp_path):
    """Builds a site whose second page has this text; returns the exit code, stderr and the folder of the site."""

    def run(text):
        source = tmp_path / "source"
        shutil.copytree(ROOT / "docs/site", source / "docs/site", ignore=lambda *_: ["api.md"])
        (source / "scripts").mkdir()
        (source / "build/docs/static").mkdir(parents=True)
        (source / "scripts/a.py").touch()
        (source / "README.md").write_text(README)
        (source / "docs/tuners.md").write_text(text)
        (source / "docs/site/api.md").write_text("# API reference\n")
        command = ("-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", ".", tmp_path / "site")
        done = subprocess.run([sys.executable, *command], cwd=source, capture_output=True, text=True)
        return done.returncode, done.stderr, tmp_path / "site"

    return run


@pytest.mark.smoke
def test_the_documentation_site_contains_a_menu_and_a_search_index_and_diagrams(build):
    code, errors, site = build(TUNERS)
    assert (code, errors) == (0, "")
    assert 'url=README.html"' in (site / "index.html").read_text()
    page = (site / "docs/tuners.html").read_text()
    assert '<pre class="mermaid">stateDiagram-v2\n  WAITING --&gt; RUNNING</pre>' in page
    assert "mermaid.min.js" in page
    assert "mermaid.min.js" not in (site / "README.html").read_text()
    assert "Read the code, the folder and <a" in page
    assert 'href="../README.html#use"' in page
    assert 'href="docs/tuners.html">Tuners</a>' in (site / "README.html").read_text()
    assert "tuner" in (site / "searchindex.js").read_text()


@pytest.mark.parametrize(
    ("link", "error"),
    [
        ("[a page](nowhere.md)", "'nowhere.md'"),
        ("[a heading](../README.md#nowhere)", "'nowhere'"),
        ("[a file](../nowhere.py)", "'../nowhere.py'"),
    ],
)
def test_the_build_of_the_documentation_site_fails_if_a_link_is_broken(build, link, error):
    code, errors, _ = build(f"# Tuners\n\n{link}\n")
    assert code != 0
    assert error in errors
