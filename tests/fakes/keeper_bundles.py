"""Keeper bundles for tests. Instead of a keeper, each archive contains a script that prints the name of the archive."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable
from pathlib import Path

from nni_manager.support.keeper_bundle import KeeperBundle, is_frozen, suffix_of
from trial_keeper import __version__

MACHINE = platform.machine()
FROZEN = f"frozen-{MACHINE}"


def make_bundle(
    folder: Path, names: Iterable[str], version: str = __version__, keeper: str = ""
) -> KeeperBundle:
    """An importable package trial_keeper_bundle in `folder` with these archives. `keeper`: what a frozen keeper runs first."""
    package = folder / "trial_keeper_bundle"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    digests = {}
    for name in names:
        scripts = {
            "trial-keeper": f"#!/bin/bash\n{keeper}\necho {name} frozen $*\n",
            "__main__.py": f"import sys\nprint('{name}', sys.flags.isolated, sys.flags.no_site, *sys.argv[1:])\n",
        }
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for path, script in scripts.items():
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(script), 0o755
                tar.addfile(member, io.BytesIO(script.encode()))
        archive, digest = content.getvalue(), hashlib.blake2b
        if not is_frozen(name):
            archive, digest = gzip.compress(archive, mtime=0), hashlib.sha256
        (package / f"{name}{suffix_of(name)}").write_bytes(archive)
        digests[name] = digest(archive).hexdigest()
    document = {"version": version, "digests": digests, "glibc": "2.36"}
    (package / "bundle.json").write_text(json.dumps(document))
    return KeeperBundle(package, digests, "2.36")
