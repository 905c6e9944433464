"""SECURITY.md names a test for each promise, and states the limits that the program has."""

import re
from pathlib import Path

import pytest

from nni_manager.engine import keeper_admission, trial_logs
from nni_manager.grpc_server import connections, servicer
from nni_manager.local_openpai import login_throttle
from nni_manager.support import http_server
from nni_manager.web import auth_middleware, change_feed, experiment_routes, session_auth
from trial_keeper.wire import safe_open

ROOT = Path(__file__).parents[2]
(PROMISED,) = re.findall(
    r"^## What is promised\n(.*?)^## ", (ROOT / "SECURITY.md").read_text(), re.MULTILINE | re.DOTALL
)
# A promise is a paragraph or a bullet, with its "Tests:" lines.
PROMISES = [each for each in re.split(r"\n\n|\n(?=- )", PROMISED.strip()) if each and each[0] != "#"]
GRPC = dict(servicer._SERVER_OPTIONS)


def names_beside(promise: str) -> list[str]:
    _, _, names = promise.partition("Tests: ")
    return re.findall(r"`([^`]+)`", names)


def existing_tests() -> list[tuple[str, str]]:
    return [
        (path.name, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[:40])
def test_every_promise_in_security_md_names_a_test(promise: str) -> None:
    assert names_beside(promise)


@pytest.mark.slow
def test_each_test_name_in_security_md_belongs_to_exactly_one_test() -> None:
    existing = existing_tests()
    for name in {name for promise in PROMISES for name in names_beside(promise)}:
        file, _, test = name.rpartition("::")
        found = [each for each in existing if each[1] == test and file in ("", each[0])]
        assert len(found) == 1, f"{name}: {found}"


@pytest.mark.parametrize(
    ("sentence", "values"),
    [
        (
            "at most 16 KiB of address and headers and 64 KiB of body, and 15 seconds to arrive",
            (
                http_server.MAX_HEAD_BYTES >> 10,
                auth_middleware.MAX_BODY_BYTES >> 10,
                http_server.REQUEST_TIMEOUT_S,
            ),
        ),
        ("have at most 4 MiB of body", (experiment_routes.MAX_CHANGE_BYTES >> 20,)),
        ("at most 200 connections", (http_server.MAX_CONNECTIONS,)),
        ("does not read an answer for 30 seconds", (http_server.READ_TIMEOUT_S,)),
        ("within ten minutes", (session_auth.CODE_S / 60,)),
        ("After a week", (session_auth.SESSION_S / (7 * 24 * 3600),)),
        ("at most 256 KiB at a time", (trial_logs.MAX_RANGE_BYTES >> 10,)),
        ("at most 50 do", (change_feed.MAX_FOLLOWERS,)),
        (
            "Hello within 20 seconds and reads its messages within 60",
            (servicer.HELLO_TIMEOUT_S, servicer.TAKEN_TIMEOUT_S),
        ),
        ("14 streams more than twice", (keeper_admission._SPARE_STREAMS,)),
        (
            "at most 1 MiB, metadata 8 KiB",
            (
                GRPC["grpc.max_receive_message_length"] >> 20,
                GRPC["grpc.absolute_max_metadata_size"] >> 10,
            ),
        ),
        ("without a stream are closed after 30 seconds", (GRPC["grpc.max_connection_idle_ms"] / 1000,)),
        ("there are at most 12,288", (servicer.MAX_CONNECTIONS,)),
        ("Above 2,048 connections", (connections.MAX_STRANGERS,)),
        ("after 50 refusals one", (servicer._REFUSALS_LOGGED_AT_ONCE,)),
        ("waits for 0.5 s; ten may wait", (login_throttle.FAILURE_COOLDOWN_S, login_throttle.MAX_WAITING)),
        ("and 64 MiB of what", (safe_open.MAX_DOCUMENT_BYTES >> 20,)),
    ],
)
def test_the_limits_in_security_md_equal_the_limits_in_the_program(
    sentence: str, values: tuple[float, ...]
) -> None:
    words = " ".join(PROMISED.split())
    assert sentence in words
    numerals = {"ten": "10", "a week": "1", "one": "", "twice": ""}
    for word, number in numerals.items():
        sentence = re.sub(rf"\b{word}\b", number, sentence)
    assert [float(each.replace(",", "")) for each in re.findall(r"[\d][\d,.]*", sentence)] == [*values]
