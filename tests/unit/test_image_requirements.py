"""`images/requirements`: package versions that pyproject.toml allows, each with its digests."""

import re
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or later reads TOML")
REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "images" / "requirements"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "keeper": [],
    "manager": ["manager", "kubernetes"],
    **{name: [name] for name in ("azure", "gp", "gpu", "tuners")},
}
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def pins(name: str, python: str) -> dict[str, Requirement]:
    """The requirement lines that apply to the Python version, by package name."""
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
    text = (FOLDER / f"{name}.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert [line for line in lines if not re.search(r" --hash=sha256:[0-9a-f]{64}", line)] == []
    found = [Requirement(line.partition(" --hash")[0]) for line in lines]
    counted = [pin for pin in found if pin.marker is None or pin.marker.evaluate(environment)]
    assert len({pin.name for pin in counted}) == len(counted)
    return {pin.name: pin for pin in counted}


def version(pin: Requirement) -> str:
    (one,) = pin.specifier
    assert one.operator == "=="
    return one.version


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", EXTRAS)
def test_each_requirement_of_pyproject_is_pinned_to_one_version_in_its_range(name, python):
    wanted = [
        *PROJECT["dependencies"],
        *(item for extra in EXTRAS[name] for item in PROJECT["optional-dependencies"][extra]),
    ]
    found = pins(name, python)
    for requirement in map(Requirement, [*wanted, "pip"]):
        pin = found[requirement.name.lower()]
        assert requirement.specifier.contains(version(pin)), f"run make lock: {pin} against {requirement}"


@pytest.mark.parametrize("python", PYTHONS)
def test_all_images_pin_the_same_versions_of_shared_packages(python):
    base = pins("manager", python)
    for name in EXTRAS:
        found = pins(name, python)
        assert {key: version(found[key]) for key in found if key in base} == {
            key: version(base[key]) for key in found if key in base
        }


def test_each_image_and_each_image_extra_has_a_requirements_file():
    assert {path.stem for path in FOLDER.iterdir()} == set(EXTRAS)
