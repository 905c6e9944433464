"""What pyproject.toml has no key for: packages of two folders, the path file by which Python finds `nni_sdk/fallback`, and the
text on a package index.

Python adds that folder to the end of its path, so a package nni that is installed beside this one is imported instead.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PATH_FILE = "trial_keeper_nni.pth"
FOLDER = "nni_sdk/fallback"
# The times of files in a wheel, in seconds since the epoch: two builds of the same files are the same. ZIP has none before 1980.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")


class BuildWithPathFile(build_py):
    """Writes the path file beside the packages."""

    def run(self) -> None:
        """Build the packages, then the path file."""
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, PATH_FILE).write_text(f"{FOLDER}\n", encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The built files."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, PATH_FILE))]


def description() -> str:
    """README.md without links to files of the repository, which a package index has not; `nnictl help` shows the pages."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\[[^]]*\]\(docs/([\w-]+)\.md[^)]*\)", r"`nnictl help \1`", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(
    packages=[
        *find_packages(include=["nni_sdk*", "trial_keeper*"]),
        "nni_sdk.fallback.nni",
        *find_packages("manager"),
        "nni_manager.docs",
    ],
    cmdclass={"build_py": BuildWithPathFile},
    long_description=description(),
    long_description_content_type="text/markdown",
)
