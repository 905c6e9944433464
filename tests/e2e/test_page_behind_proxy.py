"""The page of one experiment and the page of all experiments. The browser reaches both through nginx, below a path prefix."""

import pytest
from browser import chromium, expect, needs_chromium, visit
from made_experiment import made_experiment
from nginx import nginx
from served_hub import served_hub
from tls_files import issue

from nni_manager.store.registry import Registry
from nni_manager.support.web_server_options import WebServerOptions

pytestmark = [pytest.mark.any_machine, needs_chromium]

PREFIX = "/lab/digits"
NAMES_ITSELF = "proxy_set_header X-Forwarded-Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;"
# Chromium does not trust the issuer of the certificates of these tests, so it must ignore certificate errors.
FLAGS = ("--host-resolver-rules=MAP lab.example 127.0.0.1", "--ignore-certificate-errors")


def tls_of(folder, encrypted):
    """The certificates of nginx and of the server behind nginx. None means that the server uses HTTP."""
    return tuple(
        issue(folder / f"tls-{name}", hosts) if name in encrypted else None
        for name, hosts in (("front", ("lab.example",)), ("backend", ("localhost",)))
    )


def is_stream(answer):
    """True if the response is the stream of changes. nginx forwards the status of the stream only with the first full buffer,
    which takes minutes.
    """
    return "/events" in answer.url


# Over plain HTTP, a browser sends the header Sec-Fetch-Site only to loopback names. So for lab.example, the proxy must send the
# address of the page in its own headers.
@pytest.mark.parametrize(
    ("host", "settings", "encrypted"),
    [
        ("localhost", "", ()),
        ("lab.example", NAMES_ITSELF, ()),
        ("lab.example", NAMES_ITSELF, ("front",)),
        ("lab.example", NAMES_ITSELF, ("front", "backend")),
    ],
)
def test_the_page_behind_a_proxy_shows_and_can_change_the_experiment(
    a_real_experiment, tmp_path, host, settings, encrypted
):
    front, backend = tls_of(tmp_path, encrypted)
    experiment = a_real_experiment("import time; time.sleep(600)", trialConcurrency=1, maxTrialNum=3)
    experiment.start(options=WebServerOptions(url_prefix=PREFIX, tls=backend).arguments()[2:])
    code = experiment.ask("POST", "/entrance").json()["code"]
    scheme = "http" if front is None else "https"
    with (
        nginx(tmp_path / "nginx", experiment.port, settings=settings, front=front, backend=backend) as port,
        chromium(*FLAGS) as browser,
    ):
        origin = f"{scheme}://{host}:{port}{PREFIX}"
        with visit(browser, f"{origin}/enter#{code}") as person:
            expect(person.page).to_have_url(f"{origin}/oview")
            expect(person.see("count-RUNNING")).to_contain_text("1")
            (cookie,) = person.context.cookies()
            assert cookie["secure"] is (scheme == "https")
            edit = person.see("edit-concurrency")
            edit.get_by_role("button").first.click()
            edit.get_by_role("textbox").or_(edit.get_by_role("spinbutton")).fill("2")
            person.page.keyboard.press("Enter")
            expect(person.see("count-RUNNING")).to_contain_text("2")
            for name, path in (
                ("trials", "detail"),
                ("jobs", "jobs"),
                ("experiments", "experiment"),
                ("overview", "oview"),
            ):
                person.see(f"nav-{name}").click()
                expect(person.page).to_have_url(f"{origin}/{path}")
                expect(person.see(f"nav-{name}")).to_have_attribute("aria-current", "page")
            with person.page.expect_response(is_stream):
                person.go(f"{origin}/detail")
            expect(person.see("table")).to_be_visible()
            person.see("sign-out").click()
            expect(person.see("locked")).to_be_visible()
            expect(person.page).to_have_url(f"{origin}/oview")


@pytest.mark.parametrize("encrypted", [("front",), ("front", "backend")])
def test_the_page_of_all_experiments_works_behind_a_proxy_with_tls(
    a_real_experiment, tmp_path, monkeypatch, encrypted
):
    front, backend = tls_of(tmp_path, encrypted)
    running = a_real_experiment(
        "import time; time.sleep(600)", experiment_id="RUNNING1", experimentName="live", maxTrialNum=1
    )
    web = WebServerOptions(url_prefix=PREFIX, tls=backend)
    with served_hub(tmp_path / "home", monkeypatch, web=web) as hub:
        for experiment in (running, made_experiment(tmp_path / "made", 3)):
            Registry.of_user().add(experiment.folder)
        # The manager has a certificate, too. So the server of the page of all experiments forwards requests to the manager over
        # HTTPS.
        running.start(options=WebServerOptions(tls=issue(tmp_path / "tls-manager")).arguments()[2:])
        with (
            nginx(tmp_path / "nginx", hub.port, settings=NAMES_ITSELF, front=front, backend=backend) as port,
            chromium(*FLAGS) as browser,
        ):
            origin = f"https://lab.example:{port}{PREFIX}"
            code = hub.session_auth.new_login_code()
            with visit(browser, f"{origin}/enter#{code}") as person:
                expect(person.page).to_have_url(f"{origin}/all")
                expect(person.see("count")).to_have_text("2 of 2 experiments")
                person.page.get_by_role("link", name="live").click()
                person.is_ready()
                expect(person.page).to_have_url(f"{origin}/experiments/RUNNING1/oview")
                expect(person.see("count-RUNNING")).to_contain_text("1")
                expect(person.see("connection")).to_have_text("Live")
                person.go(f"{origin}/experiments/TESTEXPT/detail")
                expect(person.see("table-count")).to_have_text("3 of 3 trials")
                person.see("nav-all").click()
                expect(person.page).to_have_url(f"{origin}/all")
                person.see("sign-out").click()
                expect(person.see("locked")).to_contain_text("nnictl web")
