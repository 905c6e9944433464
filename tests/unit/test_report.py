"""The parts of a report that need no browser: the modules of the report, and the command that writes the report."""

import base64
import re

import pytest

from nni_manager.web import report
from nni_manager.web.files import FOLDER

pytestmark = pytest.mark.usefixtures("state_home")


def test_the_report_contains_every_javascript_module_that_another_module_of_the_report_imports():
    modules = {
        name: base64.b64decode(url.partition(",")[2]).decode() for name, url in report._modules().items()
    }
    assert len(modules) > 40
    assert "page/report/api.js" in modules
    for name, text in modules.items():
        imported = re.findall(r'^import (?:[^"]* from )?"([^"]+)";', text, re.MULTILINE)
        assert set(imported) <= modules.keys(), name
        assert not {"page/base.js", "page/state/api.js"} & set(imported), name
    sources = {f"page/{path.relative_to(FOLDER).as_posix()}" for path in FOLDER.rglob("*.js")}
    assert sources - modules.keys() == {"page/base.js", "page/state/api.js", "page/early.js"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), "ERROR: cannot write --type html to stdout; add --filename report.html\n"),
        (("-f", "r.html", "--intermediate"), "ERROR: cannot use --intermediate with --type html, which has all of that; "),
        (("-f", "r.html", "--provenance"), "ERROR: cannot use --provenance with --type html, which has all of that; "),
        (("-f", "r.html", "--all"), "ERROR: cannot use --all with --type html; add --type csv\n"),
        (("-f", "absent/r.html"), "ERROR: cannot use absent/r.html: No such file or directory; "),
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_written_causes_an_error_of_one_line(
    nnictl, an_experiment, tmp_path, monkeypatch, options, error
):
    monkeypatch.chdir(tmp_path)
    an_experiment("abc11111")
    code, out, err = nnictl("experiment", "export", "abc", "--type", "html", *options)
    assert (code, out) == (1, "")
    assert err.startswith(error)


@pytest.mark.slow
def test_a_report_is_written_for_an_experiment_without_trials(nnictl, an_experiment, tmp_path):
    an_experiment("abc11111")
    code, out, _ = nnictl("experiment", "export", "abc", "-t", "html", "-f", str(tmp_path / "r.html"))
    assert code == 0
    assert out.startswith(f"INFO: Wrote a report of abc11111 to {tmp_path}/r.html (")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
