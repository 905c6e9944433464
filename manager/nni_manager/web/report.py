"""A report: one HTML file with the page, an experiment's trials, results and configuration. It needs no server and no network.

The page's modules are those of a manager, except the ones in `page/report`, which answer from the file. They are embedded as
data URLs, by which an import map finds them; documents and the chart library are embedded compressed.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import time
from dataclasses import replace
from functools import partial
from posixpath import dirname, normpath
from typing import Any

from nni_manager.engine import profiles, serializers
from nni_manager.engine.importance import importance_of
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.trial_rows import row_view
from nni_manager.engine.trial_sample import even, sampled
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.web.files import CHARTS, FOLDER, Files
from nni_manager.web.json_encoding import to_json

MAX_TRIALS = 10_000
"""Of a larger experiment, a report has a sample."""
MAX_INTERMEDIATES = 1000
"""Of a trial with more intermediate results, a report has evenly chosen ones."""
# The modules that a report has in place of the manager's.
_REPLACED = {"base.js": "report/base.js", "state/api.js": "report/api.js"}
_NOT_IN_REPORTS = ("early.js",)
_IMPORT = re.compile(r'(?<=from ")(\.[./\w]*)(?=";)')
# Nothing may be loaded: a report cannot send what it contains.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data: blob:; style-src 'unsafe-inline'; img-src data:"
)


def report_of(folder: ExperimentFolder) -> bytes:
    """The report of a stored experiment, as it is now. Logins and other secrets are left out as on the page.

    Raises:
        StoreUnusable: the experiment cannot be read.
    """
    documents = to_json(_documents(folder))
    parts = {"documents": documents}
    files = Files()
    if CHARTS in files:
        parts["charts"] = files.content(CHARTS)
    name = json.loads(documents)["changes"]["summary"]["name"]
    embedded = "".join(
        f'<script type="application/gzip" id="{part}">{base64.b64encode(gzip.compress(content, mtime=0)).decode()}</script>\n'
        for part, content in parts.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(name)}</title>
<style>{(FOLDER / "style.css").read_text()}</style>
<script type="importmap">{json.dumps({"imports": _modules()})}</script>
</head>
<body>
<noscript>This report needs JavaScript.</noscript>
{embedded}<script type="module">import "page/main.js";</script>
</body>
</html>
""".encode()


def _modules() -> dict[str, str]:
    """A data URL for each module of the page. A module of a data URL cannot import by a relative path, only by a name."""
    found = {}
    for path in sorted(FOLDER.rglob("*.js")):
        name = path.relative_to(FOLDER).as_posix()
        if name in _NOT_IN_REPORTS or name in _REPLACED:
            continue
        text = _IMPORT.sub(partial(_named, dirname(name)), path.read_text())
        found[f"page/{name}"] = f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
    return found


def _named(folder: str, relative: re.Match[str]) -> str:
    """The name of a module, in place of its path relative to a folder."""
    name = normpath(f"{folder}/{relative[1]}").lstrip("/")
    return f"page/{_REPLACED.get(name, name)}"


def _documents(folder: ExperimentFolder) -> dict[str, Any]:
    """The answers of the manager's API that the page asks for, by the names in `page/report/api.js`."""
    snapshot = replace(ExperimentSnapshot.stored(folder), is_view=True)
    experiment = snapshot.experiment
    objectives = experiment.leaderboard.objectives
    every = list(experiment.trials.values())
    front = experiment.leaderboard.front if objectives.has_several else ()
    trials = sampled(every, MAX_TRIALS, maximize=experiment.leaderboard.maximize, front=front)
    rows = [row_view(trial) for trial in trials]
    results = [(trial.parameters, trial.result) for trial in every if trial.result is not None]
    importances = {
        each.metric: importance_of(results, each.metric, maximize=each.mode == "maximize").to_json()
        for each in objectives.all
    }
    summary = serializers.summary_view(snapshot)
    if len(trials) < len(every):
        summary["problems"].append(
            f"This report has {len(trials):,} of {len(every):,} trials, evenly chosen, with the best and the improvements; "
            "`nnictl view` shows all"
        )
    with StoreReader(folder.database) as reader:
        environments = reader.environments()
        intermediates: dict[str, list[Any]] = {trial.trial_id: [] for trial in trials}
        for page in reader.metric_pages(False):
            for row in page:
                if row.trial_id in intermediates:
                    intermediates[row.trial_id].append(row)
        packages = {digest: reader.packages(digest) for digest in reader.package_digests()}
    return {
        "madeAt": time.time() * 1000,
        "changes": {
            "version": "",
            "reset": True,
            "summary": summary,
            "trials": rows,
        },
        "wholeRows": {
            trial.trial_id: row_view(trial, is_whole=True)
            for trial, row in zip(trials, rows, strict=True)
            if "cut" in row
        },
        "profile": profiles.profile_view(snapshot),
        "configuration": profiles.configuration_view(snapshot),
        "importances": importances,
        "trials": {
            trial.trial_id: serializers.whole_trial_view(
                snapshot, trial, environments.get(trial.trial_id, ()), ()
            )
            for trial in trials
        },
        "intermediates": {
            trial_id: [
                serializers.metric_view(rows[place]) | {"place": place}
                for place in even(len(rows), MAX_INTERMEDIATES)
            ]
            for trial_id, rows in intermediates.items()
            if rows
        },
        "packages": packages,
    }
