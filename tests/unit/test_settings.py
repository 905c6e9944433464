"""The keeper's settings in the environment of a job."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.errors import SettingsInvalid
from trial_keeper.settings import KeeperSettings, without_settings
from trial_keeper.wire.messages import Stream

# An environment variable cannot contain a NUL byte, so the texts contain none.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
SETTINGS = st.builds(
    KeeperSettings,
    experiment_id=TEXT,
    job_id=TEXT,
    workspace=TEXT,
    token=TEXT,
    trial_id=st.none() | TEXT,
    collect_logs=st.booleans(),
    relay_output=st.booleans(),
    version_check=st.booleans(),
    mount=st.none() | TEXT,
    mount_wait_s=SECONDS,
    grace_s=SECONDS,
    linger_s=SECONDS,
    idle_timeout_s=SECONDS,
    max_trials=st.integers(0, 999_999_999),
    command=st.none() | TEXT,
    warm_imports=st.lists(st.from_regex(r"[a-z_]+(\.[a-z]+)?", fullmatch=True)).map(tuple),
)
SOME = KeeperSettings("exp", "job", "/mnt/exp", "token", "trial")


@given(SETTINGS, st.dictionaries(TEXT, TEXT))
def test_settings_are_read_back_unchanged_from_the_environment(
    settings: KeeperSettings, others: dict[str, str]
) -> None:
    assert KeeperSettings.from_environ(others | settings.to_environ()) == settings


@given(SETTINGS)
def test_every_setting_is_written_to_a_variable_that_starts_with_trial_keeper(
    settings: KeeperSettings,
) -> None:
    for name, value in settings.to_environ().items():
        assert name.startswith("TRIAL_KEEPER_")
        assert isinstance(value, str)


def test_durations_in_whole_seconds_are_read_back_unchanged() -> None:
    settings = replace(SOME, grace_s=3, linger_s=0)
    assert KeeperSettings.from_environ(settings.to_environ()) == settings


def test_settings_with_a_default_value_are_optional() -> None:
    environ = {name: value for name, value in SOME.to_environ().items() if not name.endswith("_S")}
    assert KeeperSettings.from_environ(environ) == SOME


def test_all_missing_settings_are_reported_together() -> None:
    with pytest.raises(SettingsInvalid) as caught:
        KeeperSettings.from_environ({"TRIAL_KEEPER_JOB_ID": "job"})
    for name in ("EXPERIMENT_ID", "WORKSPACE", "TOKEN"):
        assert f"TRIAL_KEEPER_{name} is not set" in str(caught.value)
    assert "JOB_ID is not" not in str(caught.value)
    assert "nnictl create" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("COLLECT_LOGS", "True", "not true or false"),
        ("COLLECT_LOGS", "", "not true or false"),
        ("GRACE_S", "soon", "not a number of seconds"),
        ("GRACE_S", "-1", "of at least 0"),
        ("LINGER_S", "nan", "of at least 0"),
        ("LINGER_S", "inf", "of at least 0"),
        ("TRIAL_ID", "", "empty"),
    ],
)
def test_the_error_for_an_invalid_setting_contains_the_value(name: str, text: str, complaint: str) -> None:
    with pytest.raises(SettingsInvalid, match=complaint) as caught:
        KeeperSettings.from_environ(SOME.to_environ() | {f"TRIAL_KEEPER_{name}": text})
    assert f"TRIAL_KEEPER_{name} is {text!r}" in str(caught.value)


def test_missing_and_invalid_settings_are_reported_together() -> None:
    environ = SOME.to_environ() | {"TRIAL_KEEPER_GRACE_S": "x", "TRIAL_KEEPER_RELAY_OUTPUT": "y"}
    del environ["TRIAL_KEEPER_TOKEN"]
    with pytest.raises(SettingsInvalid, match=r"TOKEN.*RELAY_OUTPUT.*GRACE_S"):
        KeeperSettings.from_environ(environ)


@given(st.dictionaries(TEXT, TEXT), SETTINGS)
def test_a_trial_does_not_inherit_the_settings_of_its_keeper(
    others: dict[str, str], settings: KeeperSettings
) -> None:
    passed_on = without_settings(others | settings.to_environ())
    assert not passed_on.keys() & settings.to_environ().keys()
    assert passed_on == without_settings(others)


def test_metrics_are_the_first_collected_stream_and_are_collected_even_without_logs() -> None:
    assert SOME.streams == (Stream.METRICS,)
    assert replace(SOME, collect_logs=True).streams[0] is Stream.METRICS
    assert set(replace(SOME, collect_logs=True).streams) == set(Stream)
