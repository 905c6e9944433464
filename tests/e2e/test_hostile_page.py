"""A hostile page in a real browser cannot run an operation of the manager or of the hub. This holds although the manager requires
no token from programs on its machine.
"""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import chromium, needs_chromium
from guarded_server import Guarded
from made_experiment import made_experiment
from served_hub import served_hub

from nni_manager.hub import api as hub_api
from nni_manager.store.registry import Registry

pytestmark = [pytest.mark.smoke, pytest.mark.any_machine, needs_chromium]

# The page sends each request only after the previous request has settled. After the last request, the page sets its title, and
# the test waits for this title.
PAGE = """<!doctype html><meta charset="utf-8"><iframe name="target"></iframe><script>
const at = "ORIGIN/api/v1/nni", jobs = "JOBS", removed = "REMOVED", body = 'BODY';
const done = (element, ...names) => new Promise((resolve) => names.forEach((name) => element[name] = resolve));
const tried = async (path, options) => { try { await fetch(at + path, { credentials: "include", ...options }); } catch {} };
async function attack() {
  await tried(jobs, { mode: "no-cors" });
  await tried(jobs, { mode: "no-cors", referrerPolicy: "no-referrer" });
  await tried(jobs, { mode: "no-cors", method: "POST", body, headers: { "Content-Type": "text/plain" } });
  await tried(jobs, { method: "POST", body, headers: { "Content-Type": "application/json" } });
  await tried(removed, { method: "DELETE" });
  for (const tag of ["img", "script", "link"]) {
    const element = document.createElement(tag);
    element.referrerPolicy = "no-referrer";
    if (tag === "link") element.rel = "stylesheet";
    element[tag === "link" ? "href" : "src"] = at + jobs + "?" + tag;
    const ended = done(element, "onload", "onerror");
    document.head.append(element);
    await ended;
  }
  const form = document.createElement("form");
  Object.assign(form, { action: at + jobs, method: "POST", enctype: "text/plain", target: "target" });
  document.body.append(form);
  const framed = done(document.querySelector("iframe"), "onload");
  form.submit();
  await framed;
  navigator.sendBeacon(at + jobs, body);
  const socket = new WebSocket(at.replace("http", "ws"));
  await done(socket, "onerror", "onopen");
  document.title = "tried everything";
}
attack();
</script>"""


def attack_on(origin, jobs="/trial-jobs", removed="/experiment", body="{}"):
    """The HTML of the hostile page. It requests the path `jobs` in several ways, some of them with this body, and sends a DELETE
    request for the path `removed`.
    """
    page = PAGE
    for name, value in {"ORIGIN": origin, "JOBS": jobs, "REMOVED": removed, "BODY": body}.items():
        page = page.replace(name, value)
    return page


def is_attacked(page, url):
    """Visit the hostile page until it has sent all its requests."""
    page.goto(url)
    page.wait_for_function("document.title === 'tried everything'")


@contextlib.contextmanager
def a_site(page):
    """A web server on this machine that answers every request with the page."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def manager():
    """The manager's access control, which admits the user's own programs."""
    server = Guarded(require_token=False)
    yield server
    server.close()


# The hostile page comes from another site, or from another port of this machine (by its loopback name or address).
@pytest.mark.parametrize("site", ["evil.example", "localhost", "127.0.0.1"])
@pytest.mark.parametrize("target", ["127.0.0.1", "localhost"])
def test_requests_from_a_hostile_page_are_refused_before_any_operation_runs(manager, site, target):
    page = attack_on(f"http://{target}:{manager.port}")
    with a_site(page) as port, chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
        is_attacked(browser.new_page(), f"http://{site}:{port}/")
    assert manager.done == 0
    # The server accepts the request of a program that is not a browser. So it refused the requests above because a browser sent
    # them.
    assert manager.ask(token=None).status_code == 200
    assert manager.done == 1


def test_dns_rebinding_to_the_manager_is_refused(manager):
    with chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
        visiting = browser.new_page()
        for host in ("evil.example", "127.0.0.1", "localhost"):
            answer = visiting.goto(f"http://{host}:{manager.port}/api/v1/nni/trial-jobs")
            assert answer.status in (400, 401, 403), host
            # The browser treats the loaded response as a page of the manager under this host name. Requests of that page are not
            # cross-origin, and the manager must refuse them too.
            verdicts = visiting.evaluate(
                "async () => [(await fetch('/a')).status, (await fetch('/a', { method: 'DELETE' })).status]"
            )
            assert {*verdicts} <= {400, 401, 403}, host
    assert manager.done == 0


@pytest.mark.parametrize("site", ["evil.example", "127.0.0.1"])
def test_a_hostile_page_cannot_use_the_hub_session_of_the_same_browser(tmp_path, monkeypatch, site):
    commands = []

    async def run(*arguments):
        commands.append(arguments)
        return "done"

    monkeypatch.setattr(hub_api, "run_nnictl", run)
    with (
        served_hub(tmp_path, monkeypatch) as hub,
        chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser,
    ):
        Registry.of_user().add(made_experiment(tmp_path / "made", 3).folder)
        body = '{"config": "/hostile.yml"}'
        page = attack_on(hub.origin, "/all", "/all/TESTEXPT", body)
        with a_site(page) as port, browser.new_context() as context:
            own = context.new_page()
            own.goto(hub.link())
            own.wait_for_selector("[data-test=experiment-TESTEXPT]")
            is_attacked(context.new_page(), f"http://{site}:{port}/")
            assert commands == []
            # Counter-check: the session is valid, because the hub's own page can use it.
            own.reload()
            own.wait_for_selector("[data-test=experiment-TESTEXPT]")
        assert hub.ask("POST", "/api/v1/nni/all", data=body).status_code == 200
        assert commands == [("create", "--config=/hostile.yml")]
