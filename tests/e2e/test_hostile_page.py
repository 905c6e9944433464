"""A hostile page in a real browser on the manager's machine reaches no operation, although programs there need no token."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import chromium, needs_chromium
from guarded_server import Guarded

pytestmark = [pytest.mark.any_machine, needs_chromium]

# The page starts an attempt after the previous attempt has settled. After the last attempt, the page sets its title.
PAGE = """<!doctype html><meta charset="utf-8"><iframe name="target"></iframe><script>
const at = "http://HOST:PORT/api/v1/nni";
const done = (element, ...names) => new Promise((resolve) => names.forEach((name) => element[name] = resolve));
const tried = async (path, options) => { try { await fetch(at + path, options); } catch {} };
async function attack() {
  await tried("/trial-jobs", { mode: "no-cors" });
  await tried("/trial-jobs", { mode: "no-cors", credentials: "include", referrerPolicy: "no-referrer" });
  await tried("/trial-jobs", { mode: "no-cors", method: "POST", body: "{}", headers: { "Content-Type": "text/plain" } });
  await tried("/trial-jobs", { method: "POST", body: "{}", headers: { "Content-Type": "application/json" } });
  await tried("/experiment", { method: "DELETE" });
  for (const tag of ["img", "script", "link"]) {
    const element = document.createElement(tag);
    element.referrerPolicy = "no-referrer";
    if (tag === "link") element.rel = "stylesheet";
    element[tag === "link" ? "href" : "src"] = at + "/trial-jobs?" + tag;
    const ended = done(element, "onload", "onerror");
    document.head.append(element);
    await ended;
  }
  const form = document.createElement("form");
  Object.assign(form, { action: at + "/trial-jobs", method: "POST", enctype: "text/plain", target: "target" });
  document.body.append(form);
  const framed = done(document.querySelector("iframe"), "onload");
  form.submit();
  await framed;
  navigator.sendBeacon(at + "/trial-jobs", "{}");
  const socket = new WebSocket(at.replace("http", "ws"));
  await done(socket, "onerror", "onopen");
  document.title = "tried everything";
}
attack();
</script>"""


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


# The hostile page comes from another site, or from a loopback name or address with a port that is not the manager's.
@pytest.mark.parametrize("site", ["evil.example", "localhost", "127.0.0.1"])
@pytest.mark.parametrize("target", ["127.0.0.1", "localhost"])
def test_requests_from_a_hostile_page_are_refused_before_any_operation_runs(manager, site, target):
    page = PAGE.replace("HOST:PORT", f"{target}:{manager.port}")
    with a_site(page) as port, chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
        visiting = browser.new_page()
        visiting.goto(f"http://{site}:{port}/")
        visiting.wait_for_function("document.title === 'tried everything'")
    assert manager.done == 0
    # The same server accepts the request of a program that is not a browser.
    assert manager.ask(token=None).status_code == 200
    assert manager.done == 1


def test_dns_rebinding_to_the_manager_is_refused(manager):
    with chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
        visiting = browser.new_page()
        for host in ("evil.example", "127.0.0.1", "localhost"):
            answer = visiting.goto(f"http://{host}:{manager.port}/api/v1/nni/trial-jobs")
            assert answer.status in (400, 401, 403), host
            # A page at this address has the manager's origin, so its requests are not cross-origin requests.
            verdicts = visiting.evaluate(
                "async () => [(await fetch('/a')).status, (await fetch('/a', { method: 'DELETE' })).status]"
            )
            assert {*verdicts} <= {400, 401, 403}, host
    assert manager.done == 0
