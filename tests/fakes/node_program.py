"""Runs JavaScript programs of the tests, which use packages of node_modules."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deadlines import scaled_s

ROOT = Path(__file__).resolve().parents[2]


def output_of(program: Path, package: str, document: Any, **options: Any) -> Any:
    """Run a program with a document as JSON on stdin; return the JSON document that it prints.

    `options`: arguments of `json.loads`. Skips the test without Node.js, or without the package that the program uses.
    """
    node = shutil.which("node")
    if node is None or not (ROOT / "node_modules" / package).is_dir():
        pytest.skip(f"{package} is not installed; run make node_modules/.installed")
    done = subprocess.run(
        [node, program],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        check=True,
        timeout=scaled_s(120),
    )
    return json.loads(done.stdout, **options)
