"""The page of an experiment in a browser that reaches its manager through nginx, below a path prefix."""

import pytest
from browser import chromium, expect, needs_chromium, visit
from nginx import nginx

pytestmark = [pytest.mark.any_machine, needs_chromium]

PREFIX = "/lab/digits"
NAMES_ITSELF = "proxy_set_header X-Forwarded-Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;"


# Over plain HTTP, a browser sends the header Sec-Fetch-Site only to loopback names. For other names, the proxy must send the
# address of the page.
@pytest.mark.parametrize(("host", "settings"), [("localhost", ""), ("lab.example", NAMES_ITSELF)])
def test_the_page_works_behind_a_proxy_and_changes_the_experiment(
    a_real_experiment, tmp_path, host, settings
):
    experiment = a_real_experiment("import time; time.sleep(600)", trialConcurrency=1, maxTrialNum=3)
    experiment.start(options=[f"--url_prefix={PREFIX}"])
    code = experiment.ask("POST", "/entrance").json()["code"]
    flags = ["--host-resolver-rules=MAP lab.example 127.0.0.1"]
    with nginx(tmp_path / "nginx", experiment.port, settings=settings) as port, chromium(*flags) as browser:
        origin = f"http://{host}:{port}{PREFIX}"
        with visit(browser, f"{origin}/enter#{code}") as person:
            expect(person.page).to_have_url(f"{origin}/oview")
            expect(person.see("count-RUNNING")).to_contain_text("1")
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
            person.go(f"{origin}/detail")
            expect(person.see("table")).to_be_visible()
            person.see("sign-out").click()
            expect(person.see("locked")).to_be_visible()
            expect(person.page).to_have_url(f"{origin}/oview")
