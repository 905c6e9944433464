"""Access to the web page of a manager and of the hub: login links, sessions, and requests from other web pages."""

import asyncio
import importlib.util
import re
import socket
import ssl

import httpx
import pytest
import requests
from deadlines import DEADLINE_S
from made_experiment import made_experiment, served_view
from served_hub import served_hub
from tls_files import issue

from nni_manager.store.folders import ManagerProcess
from nni_manager.store.registry import Registry
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.web.api import ManagerApi
from nni_manager.web.files import FOLDER, PLACES, Files

ROOT = "/api/v1/nni"


class OnHub:
    """The page of an experiment on the hub, with the same interface as a served view."""

    command, cookie_name, first_page = "nnictl web", "trial-keeper-web", "/experiments/TESTEXPT/oview"
    prefix = "/experiments/TESTEXPT"

    def __init__(self, hub):
        self.hub, self.port, self.session_auth = hub, hub.port, hub.session_auth
        self.origin, self.verify = f"{hub.origin}/experiments/TESTEXPT", hub.verify

    def link(self):
        return self.hub.link("TESTEXPT")

    def ask(self, verb, path, **options):
        return self.hub.ask(verb, f"{ROOT}{path}", **options)


@pytest.fixture(scope="module")
def served_by_manager(tmp_path_factory):
    with served_view(made_experiment(tmp_path_factory.mktemp("access"), 3).folder) as view:
        view.command, view.cookie_name = "nnictl webui url", "trial-keeper-TESTEXPT"
        view.first_page, view.prefix, view.verify = "/oview", "", True
        yield view


@pytest.fixture(scope="module")
def served_by_hub(tmp_path_factory):
    home = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as monkeypatch, served_hub(home, monkeypatch) as hub:
        Registry.of_user().add(made_experiment(home / "made", 3).folder)
        yield OnHub(hub)


@pytest.fixture(scope="module")
def served_by_hub_with_tls(tmp_path_factory):
    home = tmp_path_factory.mktemp("hub")
    web = WebServerOptions(tls=issue(home / "tls"))
    with pytest.MonkeyPatch.context() as monkeypatch, served_hub(home, monkeypatch, web=web) as hub:
        Registry.of_user().add(made_experiment(home / "made", 3).folder)
        assert hub.origin.startswith("https://127.0.0.1:")
        yield OnHub(hub)


@pytest.fixture(params=["manager", "hub", "hub_with_tls"])
def served(request):
    return request.getfixturevalue(f"served_by_{request.param}")


class Browser:
    """A client that keeps cookies like a browser, and sends the session's key like the page."""

    def __init__(self, served):
        self._origin = served.origin
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.verify = served.verify
        self.key = ""

    def ask(self, verb, path, **options):
        headers = {"X-Trial-Keeper": self.key, "Sec-Fetch-Site": "same-origin"} | options.pop("headers", {})
        return self.session.request(
            verb, self._origin + path, headers=headers, timeout=DEADLINE_S, allow_redirects=False, **options
        )

    def enter(self, link):
        answer = self.ask("POST", f"{ROOT}/session", json={"code": link.partition("#")[2]})
        if answer.ok:
            self.key = answer.json()["key"]
        return answer


@pytest.fixture
def browser(served):
    made = Browser(served)
    with made.session:
        yield made


def ask(served, verb, **options):
    """The response to a client without a session."""
    url = f"{served.origin}{ROOT}/session"
    return requests.request(verb, url, timeout=DEADLINE_S, verify=served.verify, **options)


def connect(served):
    peer = socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S)
    if served.verify is True:
        return peer
    return ssl.create_default_context(cafile=served.verify).wrap_socket(peer, server_hostname="localhost")


def test_a_login_link_is_refused_at_its_second_use(served, browser):
    link = served.link()
    assert browser.ask("GET", f"{ROOT}/summary").status_code == 401
    assert browser.ask("GET", link.partition("#")[0].removeprefix(served.origin)).status_code == 200
    entered = browser.enter(link)
    assert (entered.status_code, entered.headers["Cache-Control"]) == (200, "no-store")
    assert browser.ask("GET", f"{ROOT}/summary").json()["id"] == "TESTEXPT"
    again = browser.enter(link)
    assert again.status_code == 403
    assert again.json()["error"].endswith(f"`{served.command}` prints another")


def test_the_session_cookie_is_httponly_and_samesite_strict(served, browser):
    cookie = browser.enter(served.link()).headers["Set-Cookie"]
    assert cookie.startswith(f"{served.cookie_name}=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    # The cookie is Secure only over HTTPS, because browsers drop a Secure cookie that a server sends over HTTP.
    assert ("Secure" in cookie.split("; ")) is served.origin.startswith("https:")
    assert served.session_auth.token not in cookie
    assert browser.key not in cookie


@pytest.mark.parametrize(("scheme", "is_secure"), [("http", False), ("https", True)])
def test_the_session_cookie_is_secure_only_over_https(served_by_manager, scheme, is_secure):
    """A proxy may terminate HTTPS, so X-Forwarded-Proto counts too."""
    served = served_by_manager
    app = ManagerApi(
        served.view, WebServerOptions(require_token=True), served.port, served.session_auth, lambda: None
    ).app()
    code = {"code": served.session_auth.new_login_code()}

    async def log_in(base, headers):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client:
            return await client.post(f"{ROOT}/session", json=code)

    for base, headers in ((f"{scheme}://127.0.0.1", {}), ("http://127.0.0.1", {"X-Forwarded-Proto": scheme})):
        code["code"] = served.session_auth.new_login_code()
        cookie = asyncio.run(log_in(base, headers)).headers["Set-Cookie"]
        assert ("Secure" in cookie.split("; ")) is is_secure


def test_a_request_needs_both_the_cookie_and_the_key(served, browser):
    browser.enter(served.link())
    key, browser.key = browser.key, ""
    for path in (f"{ROOT}/summary", f"{ROOT}/changes", f"{ROOT}/events", f"{ROOT}/openapi.json"):
        assert browser.ask("GET", path).status_code == 401, path
    assert browser.ask("DELETE", f"{ROOT}/experiment").status_code == 401
    browser.session.cookies.clear()
    browser.key = key
    assert browser.ask("GET", f"{ROOT}/summary").status_code == 401


def test_a_session_cannot_create_login_links(served, browser):
    browser.enter(served.link())
    refused = browser.ask("POST", f"{ROOT}/entrance")
    assert (refused.status_code, refused.json()["error"]) == (
        403,
        "cannot accept this request from a web page; use nnictl",
    )
    made = served.ask("POST", "/entrance")
    assert made.json().keys() == {"code", "expiresInS"}
    assert browser.enter("#" + made.json()["code"]).status_code == 200


def test_a_signed_out_session_is_refused(served, browser):
    browser.enter(served.link())
    cookies = dict(browser.session.cookies)
    gone = browser.ask("DELETE", f"{ROOT}/session")
    assert gone.status_code == 200
    assert not browser.session.cookies
    browser.session.cookies.update(cookies)
    assert browser.ask("GET", f"{ROOT}/summary").status_code == 401


def test_a_login_deletes_the_oldest_session_cookies_of_other_experiments(served, browser):
    """Browsers send cookies to every port of a host, so the total size of the cookies must stay bounded."""
    for number in range(100):
        name = f"{'0' * 32}.{1_900_000_000 + number}.{'0' * 64}"
        browser.session.cookies.set(f"trial-keeper-OLDER{number:03d}", name, domain="127.0.0.1", path="/")
    browser.session.cookies.set("theirs", "kept", domain="127.0.0.1", path="/")
    assert browser.enter(served.link()).status_code == 200
    assert {*browser.session.cookies.keys()} == {
        "theirs",
        served.cookie_name,
        *(f"trial-keeper-OLDER{number:03d}" for number in range(60, 100)),
    }
    assert browser.ask("GET", f"{ROOT}/summary").status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"code": 1}', b'{"code": null}', b'{"code": "x"}', b"\xff"]
)
def test_an_invalid_login_code_is_refused_with_an_error(served, body):
    answer = ask(served, "POST", data=body)
    assert answer.status_code in (400, 403)
    assert answer.json()["error"].startswith("cannot ")
    assert "Set-Cookie" not in answer.headers


def test_without_a_session_only_a_login_request_with_a_short_body_is_accepted(served):
    assert ask(served, "POST", data=b"x" * 2000).status_code == 413
    assert ask(served, "PUT", data=b"").status_code == 401
    assert ask(served, "DELETE").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        # An old browser sends no Sec-Fetch headers, so the server must refuse its requests by their Origin.
        {"Origin": "http://evil.example", "Sec-Fetch-Site": None},
        {"Origin": "null", "Sec-Fetch-Site": None},
        {"Origin": "null", "Sec-Fetch-Site": None, "X-Forwarded-Host": "proxy.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_requests_from_another_web_page_are_refused_despite_a_session(served, browser, headers):
    browser.enter(served.link())
    for verb, path in [("GET", "summary"), ("DELETE", "experiment"), ("POST", "session")]:
        refused = browser.ask(verb, f"{ROOT}/{path}", headers=headers)
        assert (refused.status_code, refused.json()["error"]) == (
            403,
            "cannot accept a request from another web page; use nnictl",
        )


def test_another_site_may_link_to_the_page_but_may_not_embed_files_of_the_page(served, browser):
    follow = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}
    assert browser.ask("GET", "/enter", headers=follow).status_code == 200
    for dest in ("script", "iframe", "empty", "image"):
        assert browser.ask("GET", "/enter", headers=follow | {"Sec-Fetch-Dest": dest}).status_code == 403
    assert browser.ask("GET", "/enter", headers=follow | {"Host": "evil.example"}).status_code == 400


# ---- the files of the page


def test_the_page_is_served_without_a_session_and_cached_by_etag(served, browser):
    for path in PLACES:
        answer = browser.ask("GET", path)
        edition = re.search(rf'"{served.prefix}/page/(\w+)/main.js"', answer.text)[1]
        document = answer.text.replace(f"{served.prefix}/page/{edition}/", "/page/").replace(
            ' data-home=""', ""
        )
        assert document == (FOLDER / "index.html").read_text()
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        tag = answer.headers["ETag"]
        assert answer.headers["Cache-Control"] == "no-cache"
        assert answer.headers["Content-Encoding"] == "gzip"
        kept = browser.ask("GET", path, headers={"If-None-Match": tag})
        assert (kept.status_code, kept.content) == (304, b"")
        assert browser.ask("HEAD", path).status_code == 200
    assert browser.ask("GET", "/").headers["Location"] == served.first_page


def test_every_file_of_the_page_is_served_unchanged(served, browser):
    for path in (path for path in FOLDER.rglob("*") if path.is_file()):
        answer = browser.ask("GET", f"/page/{path.relative_to(FOLDER).as_posix()}")
        assert path.suffix == ".html" or answer.content == path.read_bytes(), path
        if path.suffix == ".js":
            assert answer.headers["Content-Type"] == "text/javascript; charset=utf-8"


def test_page_files_are_cached_under_their_current_url_and_revalidated_under_an_outdated_url(served, browser):
    document = browser.ask("GET", "/oview").text
    names = re.findall(rf'(?:src|href)="{served.prefix}(/page/[^"]+)"', document)
    assert len(names) > 3
    for name in names:
        answer = browser.ask("GET", name)
        assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "max-age=31536000, immutable")
    other = browser.ask("GET", re.sub(r"/page/\w{16}/", f"/page/{'0' * 16}/", names[0]))
    assert (other.status_code, other.headers["Cache-Control"]) == (200, "no-cache")


def test_the_common_url_of_all_page_files_changes_when_one_file_changes(tmp_path):
    (tmp_path / "index.html").write_text('<script src="/page/main.js"></script>')
    (tmp_path / "main.js").write_text("1")
    before = Files(tmp_path).edition
    assert Files(tmp_path).edition == before
    (tmp_path / "main.js").write_text("2")
    assert Files(tmp_path).edition != before


def test_plotly_is_served_from_its_installed_package(served, browser):
    if importlib.util.find_spec("plotly") is None:
        pytest.skip("plotly is not installed")
    answer = browser.ask("GET", "/page/plotly.min.js")
    assert answer.status_code == 200
    assert b"plotly" in answer.content[:500]


@pytest.mark.parametrize(
    "target",
    [
        "/page/", "/page", "/page/0123456789abcdef/../gate.py",
        "/page/0123456789abcdef/0123456789abcdef/main.js",
        "/page/../gate.py", "/page/..%2fgate.py", "/page/%2e%2e/gate.py", "/page//etc/passwd", "/page/gate.py",
        "/page/index.html/", "/page/index.html%00", "/page/%ff", "/enter/..", "/oview/..", "/page/./index.html", "//oview",
    ],
)  # fmt: skip
def test_paths_outside_the_page_are_not_served(served, target):
    with connect(served) as peer:
        peer.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while piece := peer.recv(65536):
            answer += piece
    assert answer.split(b" ")[1] == b"401", answer


@pytest.mark.parametrize("accept", ["text/html,*/*;q=0.8", "*/*"])
def test_an_unknown_page_returns_404_without_a_login(served_by_manager, accept):
    served = served_by_manager
    answer = requests.get(
        f"{served.origin}/enter/x",
        headers={"Accept": accept, "Sec-Fetch-Mode": "navigate"},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 404
    assert (answer.headers["Content-Type"].split(";")[0] == "text/html") == ("html" in accept)
    assert ("main.js" in answer.text) == ("html" in accept)
    assert (
        requests.get(
            f"{served.origin}/api/x",
            headers={"Accept": accept, "Sec-Fetch-Mode": "navigate"},
            timeout=DEADLINE_S,
        ).status_code
        == 401
    )


def test_every_response_has_security_headers(served, browser):
    browser.enter(served.link())
    for verb, path, status in [
        ("GET", "/oview", 200),
        ("GET", "/", 307),
        ("GET", f"{ROOT}/summary", 200),
        ("GET", f"{ROOT}/nothing", 404),
        ("GET", "/nothing", 404),
        ("POST", f"{ROOT}/entrance", 403),
    ]:
        answer = browser.ask(verb, path)
        assert answer.status_code == status
        policy = answer.headers["Content-Security-Policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert (rules["default-src"], rules["script-src"], rules["connect-src"]) == (
            "'none'",
            "'self'",
            "'self'",
        )
        assert (rules["frame-ancestors"], rules["base-uri"], rules["form-action"]) == ("'none'",) * 3
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in answer.headers
        if path.startswith(ROOT):
            assert answer.headers["Cache-Control"] == "no-store"


def test_the_base_url_of_a_manager_depends_on_its_host_and_certificate_and_prefix():
    for host, certificate, url in [
        ("127.0.0.1", None, "http://127.0.0.1:80"),
        ("0.0.0.0", "AA", "https://127.0.0.1:80"),
        ("::", "AA", "https://[::1]:80"),
    ]:
        process = ManagerProcess(1, host, 80, "0.6.0", "", certificate, "/lab/x")
        assert process.base_url == f"{url}/lab/x"
        assert ManagerProcess(1, host, 80, "0.6.0", "", certificate).base_url == url
