"""Keeper bundles for tests. Instead of a keeper, each archive contains a script that prints the name of the archive."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable
from pathlib import Path

from nni_manager.support.keeper_bundle import KeeperBundle
from trial_keeper import __version__

MACHINE = platform.machine()
FROZEN = f"frozen-{MACHINE}"


def make_bundle(folder: Path, names: Iterable[str], version: str = __version__) -> KeeperBundle:
    """An importable package trial_keeper_bundle in `folder` with these archives."""
    package = folder / "trial_keeper_bundle"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    digests = {}
    for name in names:
        archive = package / f"{name}.tar.gz"
        scripts = {
            "trial-keeper": f"#!/bin/bash\necho {name} frozen $*\n",
            "__main__.py": f"import sys\nprint('{name}', sys.flags.isolated, sys.flags.no_site, *sys.argv[1:])\n",
        }
        with tarfile.open(archive, "w:gz") as tar:
            for path, content in scripts.items():
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(content), 0o755
                tar.addfile(member, io.BytesIO(content.encode()))
        digests[name] = hashlib.sha256(archive.read_bytes()).hexdigest()
    document = {"version": version, "sha256": digests, "glibc": "2.36"}
    (package / "bundle.json").write_text(json.dumps(document))
    return KeeperBundle(package, digests, "2.36")
