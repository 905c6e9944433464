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
        # compared as numbers, not as text
        ("2.1", "2.10", False),
        ("2.10", "2.1", False),
        ("2.10.3", "2.10", True),
        ("2", "2.0.5", True),
        ("1.0", "01.0", True),
        # this manager is older than the version check
        ("0.5", "0.9", True),
        ("0.5.9", "7.1", True),
        ("0.1", "0.0.1", True),
        ("0.6", "0.5", False),
        # these builds have no release number
        ("0.6.0.dev3", "0.6.2", True),
        ("0.6.1", "0.6.0.dev3+g1a2b3c4", True),
        ("0.6.0rc1", "0.6.0", True),
        ("0.7.0.dev0", "0.6.9", False),
        ("0.6.1.post1", "0.6.1", True),
        ("v0.6.1", "0.6.1", True),
        # these versions are invalid
        ("0.6.1", "", False),
        ("0.6.1", "latest", False),
        ("latest", "0.6.1", False),
        ("latest", "latest", True),
        ("0.5", "latest", False),
        ("0.6.1", "0.6.1\n; rm -rf", False),
    ],
)
def test_the_first_two_version_numbers_must_agree(manager: str, keeper: str, agree: bool) -> None:
    assert versions_agree(manager, keeper) is agree


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_the_third_version_number_may_differ(major: int, minor: int, patch: int, other: int) -> None:
    assert versions_agree(f"{major}.{minor}.{patch}", f"{major}.{minor}.{other}")


@given(st.tuples(NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS))
def test_different_first_two_numbers_are_compatible_only_with_an_old_manager(
    manager: tuple[int, int], keeper: tuple[int, int]
) -> None:
    agree = versions_agree("{}.{}".format(*manager), "{}.{}".format(*keeper))
    assert agree == (manager == keeper or manager < (0, 6))


@given(st.text(), st.text())
def test_any_text_is_compared_without_an_exception(manager: str, keeper: str) -> None:
    assert versions_agree(manager, keeper) in (True, False)


def test_this_release_is_compatible_with_itself() -> None:
    assert versions_agree(__version__, __version__)


def test_the_message_names_both_versions_and_the_remedy() -> None:
    message = mismatch_message("0.6.1", "0.5.2")
    assert message.startswith("cannot run")
    assert "0.5.2" in message
    assert "pip install 'trial-keeper==0.6.1'" in message
    assert "versionCheck: false" in message
