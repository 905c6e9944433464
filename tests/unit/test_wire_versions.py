"""The compatibility of keeper and manager versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper import __version__
from trial_keeper.wire.versions import mismatch_message, versions_agree

NUMBERS = st.integers(0, 30)


@pytest.mark.parametrize(
    ("manager", "keeper", "agree"),
    [
        ("0.6.1", "0.6", True),
        ("0.6.1", "0.6.2", True),
        ("0.6.1", "0.6.1", True),
        ("0.6.1", "0.5.1", False),
        ("0.6.1", "0.7", False),
        ("0.6.1", "1.6.1", False),
        # The parts of a version are compared as numbers: 2.10 is not 2.1, but 01.0 is 1.0.
        ("2.1", "2.10", False),
        ("2.10", "2.1", False),
        ("2.10.3", "2.10", True),
        ("2", "2.0.5", True),
        ("1.0", "01.0", True),
        # A manager before 0.6 accepts a keeper of any version, and 0.6 does not.
        ("0.5", "0.9", True),
        ("0.5.9", "7.1", True),
        ("0.1", "0.0.1", True),
        ("0.6", "0.5", False),
        # Of development builds, release candidates and post-releases, too, only the first two numbers are compared.
        ("0.6.0.dev3", "0.6.2", True),
        ("0.6.1", "0.6.0.dev3+g1a2b3c4", True),
        ("0.6.0rc1", "0.6.0", True),
        ("0.7.0.dev0", "0.6.9", False),
        ("0.6.1.post1", "0.6.1", True),
        ("v0.6.1", "0.6.1", True),
        # An invalid version agrees only with itself, even if the manager is older than 0.6.
        ("0.6.1", "", False),
        ("0.6.1", "latest", False),
        ("latest", "0.6.1", False),
        ("latest", "latest", True),
        ("0.5", "latest", False),
        ("0.6.1", "0.6.1\n; rm -rf", False),
    ],
)
def test_versions_with_equal_major_and_minor_numbers_are_compatible(
    manager: str, keeper: str, agree: bool
) -> None:
    assert versions_agree(manager, keeper) is agree


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_the_patch_number_of_a_version_does_not_affect_compatibility(
    major: int, minor: int, patch: int, other: int
) -> None:
    assert versions_agree(f"{major}.{minor}.{patch}", f"{major}.{minor}.{other}")


@given(st.tuples(NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS))
def test_versions_with_different_major_or_minor_numbers_agree_only_if_the_manager_is_older_than_0_6(
    manager: tuple[int, int], keeper: tuple[int, int]
) -> None:
    agree = versions_agree("{}.{}".format(*manager), "{}.{}".format(*keeper))
    assert agree == (manager == keeper or manager < (0, 6))


@given(st.text(), st.text())
def test_version_texts_of_any_form_are_compared_without_an_exception(manager: str, keeper: str) -> None:
    assert versions_agree(manager, keeper) in (True, False)


def test_this_release_is_compatible_with_itself() -> None:
    assert versions_agree(__version__, __version__)


def test_the_mismatch_message_has_both_versions_and_the_remedy() -> None:
    message = mismatch_message("0.6.1", "0.5.2")
    assert message.startswith("cannot run")
    assert "0.5.2" in message
    assert "`pip install .` in a checkout of trial-keeper 0.6.1" in message
    assert "versionCheck: false" in message
