"""Clients guess passwords of the local OpenPAI: many clients at the same time, and while users log in."""

import concurrent.futures
import json
import os
import socket
import time

import pytest
from deadlines import DEADLINE_S
from openpai_here import PASSWORDS, an_openpai_here
from strangers import NOBODY

from nni_manager.local_openpai.login_throttle import FAILURE_COOLDOWN_S, MAX_WAITING

PATH = "/api/v2/authn/basic/login"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    with an_openpai_here(tmp_path_factory.mktemp("logins")) as here:
        yield here


def a_guess(here, name="bob", password="a guess", uid=None):
    """Send a login request. With `uid`, the connection belongs to this user of the machine. Return the connection."""
    host, _, port = here.address.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    if uid is not None:
        os.fchown(peer.fileno(), uid, uid)
    body = json.dumps({"username": name, "password": password}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {here.address}\r\nContent-Type: application/json\r\n"
    peer.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    return peer


def answer_to(peer):
    """Return the status, the body and the time of the response."""
    with peer, peer.makefile("rb") as answer:
        head, _, body = answer.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body), time.monotonic()


def answers_to(peers):
    with concurrent.futures.ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(answer_to, peers))


def log_in(here):
    answer = here.client(None).post(PATH, json={"username": "ada", "password": PASSWORDS["ada"]})
    return answer.status_code


def test_concurrent_wrong_passwords_are_checked_one_by_one_and_excess_attempts_are_refused(here):
    begun_s = time.monotonic()
    answers = answers_to([a_guess(here, f"user{number}") for number in range(60)])
    checked = [at_s - begun_s for status, _, at_s in answers if status == 400]
    refused = [said for status, said, _ in answers if status == 429]
    last_refusal_s = max(at_s - begun_s for status, _, at_s in answers if status == 429)
    assert len(checked) + len(refused) == 60
    # Each completed check frees a position in the queue for one further guess.
    assert MAX_WAITING <= len(checked) <= MAX_WAITING + 1 + last_refusal_s / FAILURE_COOLDOWN_S
    # The checks are FAILURE_COOLDOWN_S (0.5 s) apart. A check takes 30 ms of CPU, so guesses use only 6 % of a core.
    assert max(checked) >= (len(checked) - 1) * FAILURE_COOLDOWN_S
    assert {said["code"] for said in refused} == {"TooManyLoginsError"}
    assert all("of your attempts are already queued; try again in 5 s" in said["message"] for said in refused)
    assert log_in(here) == 200


def test_a_user_can_log_in_while_another_user_guesses_passwords(here):
    if os.geteuid() != 0:
        pytest.skip("needs root, to connect as another user")
    guesses = [a_guess(here, uid=NOBODY) for _ in range(30)]
    assert log_in(here) == 200
    logged_in_at_s = time.monotonic()
    answers = answers_to(guesses)
    assert {status for status, _, _ in answers} == {400, 429}
    assert logged_in_at_s < max(at_s for status, _, at_s in answers if status == 400)


def test_concurrent_valid_logins_all_succeed(here):
    peers = [a_guess(here, "bob", PASSWORDS["bob"]) for _ in range(MAX_WAITING)]
    assert [status for status, _, _ in answers_to(peers)] == [200] * MAX_WAITING


def test_an_unknown_user_and_a_wrong_password_receive_the_same_response(here):
    answers = answers_to([a_guess(here, name) for name in ("bob", "eve")])
    (first, first_words, _), (second, second_words, _) = answers
    assert (first, first_words) == (second, second_words)
    assert first_words["code"] == "IncorrectPasswordError"
