"""Adds to the wheel what pyproject.toml has no key for: the path file by which Python finds `nni_sdk/fallback`.

Python adds that folder to the end of its path, so a package nni that is installed beside this one is imported instead.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PATH_FILE = "trial_keeper_nni.pth"
FOLDER = "nni_sdk/fallback"


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


setup(cmdclass={"build_py": BuildWithPathFile})
