"""The keeper for images that have none: the archives of the installed package trial_keeper_bundle.

images/keeper_bundle.py builds that package. run.sh chooses an archive in the container: `cp311-x86_64` for the image's own
CPython 3.11, `frozen-x86_64` with an interpreter of its own.

A frozen keeper is not compressed, and its digest is BLAKE2b: gzip and sha256sum, which an image without Python would need, take
longer for it than all else until the keeper runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from nni_manager.errors import UserError
from trial_keeper import __version__
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.versions import versions_agree

KeeperSource = Literal["auto", "image", "bundle"]
"""Where the keeper of a container is. `auto`: in the bundle, if one is installed and the image has no keeper of this version."""

DIGEST_CHARACTERS = 16
"""Of an archive's digest in its file name in workspaces."""

_PACKAGE = "trial_keeper_bundle"
_INSTALL = (
    f"`make keeper-bundle` in a checkout of trial-keeper {__version__}, then `pip install --force-reinstall "
    "build/trial_keeper_bundle-*.whl`"
)


class BundleUnusable(UserError):
    """cannot use the keeper's bundle; install the one of this version in nnictl's Python"""


@dataclass(frozen=True, slots=True)
class KeeperBundle:
    """An installed bundle. `digests` has the digest of each archive in `folder`, by the archive's name: SHA-256, or BLAKE2b of a
    frozen keeper.

    `is_preferred`: the image's own keeper is not used. `glibc` is the oldest version for the frozen keeper.
    """

    folder: Path
    digests: Mapping[str, str]
    glibc: str
    is_preferred: bool = False

    @property
    def requirement(self) -> str:
        """What a container or a machine needs, as text."""
        machines = " or ".join(sorted({name.partition("-")[2] for name in self.digests}))
        return f"{machines}, and CPython 3.10 to 3.14 with libstdc++, or glibc {self.glibc} or later with tar and b2sum"

    def archive(self, name: str) -> Path:
        """The path of an archive in the package."""
        return self.folder / f"{name}{suffix_of(name)}"

    def stored_name(self, name: str) -> str:
        """The file name of an archive in workspaces."""
        return f"{name}-{self.digests[name][:DIGEST_CHARACTERS]}{suffix_of(name)}"


def is_frozen(name: str) -> bool:
    """Whether the keeper of this archive has an interpreter of its own."""
    return name.startswith("frozen-")


def suffix_of(name: str) -> str:
    """The end of an archive's file name."""
    return ".tar" if is_frozen(name) else ".tar.gz"


def digest_program(name: str) -> str:
    """The program of coreutils that computes the digest of an archive."""
    return "b2sum" if is_frozen(name) else "sha256sum"


def bundle_for(source: KeeperSource) -> KeeperBundle | None:
    """The bundle that an experiment uses; None without one.

    Raises:
        BundleUnusable: the bundle is required and not installed, or it is of another version.
    """
    if source == "image":
        return None
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        if source == "bundle":
            raise BundleUnusable(f"cannot use keeper: bundle: {_PACKAGE} is not installed; run {_INSTALL}")
        return None
    folder = Path(found.origin).parent
    try:
        document = json.loads((folder / "bundle.json").read_bytes())
        version = str(document["version"])
        digests = {str(name): str(digest) for name, digest in document["digests"].items()}
        bundle = KeeperBundle(folder, digests, str(document["glibc"]), is_preferred=source == "bundle")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleUnusable(
            f"cannot read {folder / 'bundle.json'}: {type(error).__name__}: {error}; run {_INSTALL}"
        ) from error
    if not versions_agree(__version__, version):
        raise BundleUnusable(
            f"cannot use {_PACKAGE} {version} with trial-keeper {__version__}: the first two numbers differ; run {_INSTALL}, or "
            "set keeper: image"
        )
    return bundle
