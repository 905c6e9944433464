"""A fake Azure for file shares: logins, a vault, and the file service of one account.

The real SDK uses Azure's own addresses; an HTTPS proxy redirects its connections to this process, so the code under
test is unchanged. The files of a share are in a folder, where clients that mount the share see them.

Source: Azure Files REST API 2021-04-10 and its Shared Key authorization; Key Vault REST API 7.x; OAuth 2.0
client credentials.
"""

import base64
import contextlib
import datetime
import hashlib
import hmac
import io
import json
import shutil
import ssl
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from deadlines import DEADLINE_S

ACCOUNT, SHARE, VAULT, SECRET = "mystorage", "nni", "my-vault", "storage-key"
TENANT, CLIENT, PASSWORD = "11111111-2222-3333-4444-555555555555", "c11e47", "s3cret-of-the-login"
LOGIN_HOST = "login.microsoftonline.com"
VAULT_HOST = f"{VAULT}.vault.azure.net"
FILE_HOST = f"{ACCOUNT}.file.core.windows.net"
_TOKEN = "token-of-the-vault"
_SIGNED = (
    *("Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date"),
    *("If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"),
)


def new_key(words):
    """An account key in its usual format."""
    return base64.b64encode(hashlib.sha512(words.encode()).digest()).decode()


class Azure:
    """`folder` contains the shares, one folder each. The file service accepts `key`; the vault stores
    `vault_key`.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.shares = self.folder / "shares"
        self.shares.mkdir(parents=True)
        self.key = self.vault_key = new_key("first")
        self.asked: list[str] = []
        """Each call of the file service, e.g. `PUT nni/EXPT/run.sh?comp=range`."""
        self.fails_with: list[tuple[int, str]] = []
        """The next responses of the file service instead of the requested ones; status 0 closes the
        connection.
        """
        self.refuses: tuple[int, str] | None = None
        """The response to every changing call whose path contains `refuses_at`."""
        self.refuses_at = ""
        self.is_authenticated = True
        """Whether the vault permits this login to read."""
        self._lock = threading.Lock()
        self._certificate = self.folder / "azure.pem"
        self._tls = write_certificate(self._certificate, [LOGIN_HOST, VAULT_HOST, FILE_HOST])
        azure = self

        class Served(_Connection):
            site = azure

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)

    @property
    def environ(self):
        """Environment variables with a login, and with the proxy that redirects Azure's SDK to this process."""
        return {
            "HTTPS_PROXY": f"http://127.0.0.1:{self._server.server_address[1]}",
            "NO_PROXY": "127.0.0.1,localhost",
            "REQUESTS_CA_BUNDLE": str(self._certificate),
            "AZURE_TENANT_ID": TENANT,
            "AZURE_CLIENT_ID": CLIENT,
            "AZURE_CLIENT_SECRET": PASSWORD,
        }

    @property
    def share(self):
        """The folder of the share."""
        return self.shares / SHARE

    def writes(self):
        """The calls that changed something."""
        with self._lock:
            return [each for each in self.asked if each.startswith(("PUT", "DELETE"))]

    def note(self, call):
        with self._lock:
            self.asked.append(call)
            if self.refuses and call.startswith(("PUT", "DELETE")) and self.refuses_at in call:
                return self.refuses
            return self.fails_with.pop(0) if self.fails_with else None


class _Connection(BaseHTTPRequestHandler):
    """A connection to the proxy. Inside the CONNECT tunnel, this process acts as the requested host and terminates TLS."""

    site: Azure
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *_):
        pass

    def do_CONNECT(self):
        self.send_response(200)
        self.end_headers()
        with (
            # The client may close the connection at any time.
            contextlib.suppress(OSError),
            self.site._tls.wrap_socket(self.connection, server_side=True) as within,
            within.makefile("rb") as self.rfile,
            within.makefile("wb", 0) as self.wfile,
        ):
            self.close_connection = False
            while not self.close_connection:
                self.handle_one_request()
        # The tunnel was the last request of the connection, so the handler finds no more bytes to read.
        self.rfile, self.wfile = io.BytesIO(), io.BytesIO()
        self.close_connection = True

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        path, query = unquote(parts.path).strip("/"), dict(parse_qsl(parts.query, keep_blank_values=True))
        match self.headers["Host"]:
            case host if host == LOGIN_HOST:
                self._login(path, dict(parse_qsl(body.decode())))
            case host if host == VAULT_HOST:
                self._vault(path)
            case host if host == FILE_HOST:
                self._files(parts, path, query, body)
            case host:
                self._answer(502, f"nobody is {host}".encode())

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815 - http.server's names

    def _answer(self, status, content=b"", kind="application/json", **headers):
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        if content:
            self.send_header("Content-Type", kind)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, status, document, **headers):
        self._answer(status, json.dumps(document).encode(), **headers)

    # ---- logins

    def _login(self, path, form):
        base = f"https://{LOGIN_HOST}/{TENANT}"
        if path.endswith("openid-configuration"):
            self._json(
                200,
                {
                    "issuer": f"{base}/v2.0",
                    "authorization_endpoint": f"{base}/oauth2/v2.0/authorize",
                    "token_endpoint": f"{base}/oauth2/v2.0/token",
                },
            )
        elif path.endswith("discovery/instance"):
            where = f"{base}/v2.0/.well-known/openid-configuration"
            self._json(200, {"tenant_discovery_endpoint": where, "metadata": []})
        elif form.get("client_secret") != PASSWORD:
            words = "AADSTS7000215: Invalid client secret provided."
            self._json(401, {"error": "invalid_client", "error_description": words})
        else:
            assert form["scope"].startswith("https://vault.azure.net/")
            self._json(200, {"token_type": "Bearer", "expires_in": 3599, "access_token": _TOKEN})

    # ---- the vault

    def _vault(self, path):
        if self.headers.get("Authorization") != f"Bearer {_TOKEN}":
            where = (
                f'Bearer authorization="https://{LOGIN_HOST}/{TENANT}", resource="https://vault.azure.net"'
            )
            self._json(401, {"error": {"code": "Unauthorized"}}, WWW_Authenticate=where)
        elif not self.site.is_authenticated:
            self._json(403, {"error": {"code": "Forbidden", "message": "no secrets get permission"}})
        elif path.split("/")[:2] != ["secrets", SECRET]:
            self._json(404, {"error": {"code": "SecretNotFound", "message": "not found"}})
        else:
            found = {"value": self.site.vault_key, "id": f"https://{VAULT_HOST}/secrets/{SECRET}/1"}
            self._json(200, found | {"attributes": {"enabled": True}})

    # ---- files

    def _refuse(self, status, code):
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
        self._answer(status, text.encode(), "application/xml", x_ms_error_code=code)

    def _files(self, parts, path, query, body):
        fault = self.site.note(f"{self.command} {path}" + (f"?{parts.query}" if parts.query else ""))
        if fault is not None:
            if fault[0]:
                self._refuse(*fault)
            else:
                self.close_connection = True
            return
        if not self._is_signed(parts, query):
            self._refuse(403, "AuthenticationFailed")
            return
        place, verb = self.site.shares / path, self.command
        share = self.site.shares / path.split("/", maxsplit=1)[0]
        with self.site._lock:
            kind, part = query.get("restype", "file"), query.get("comp", "")
            if kind != "share" and not share.is_dir():
                self._refuse(404, "ShareNotFound")
            elif verb == "PUT" and kind in ("share", "directory"):
                self._make_folder(place, kind)
            elif verb == "PUT":
                self._put(place, part, body)
            elif verb == "GET" and part == "list":
                self._list(place)
            elif not place.exists():
                self._refuse(404, "ShareNotFound" if kind == "share" else "ResourceNotFound")
            elif verb == "DELETE":
                self._remove(place)
            elif place.is_dir() or verb == "HEAD":
                size = {} if place.is_dir() else {"Content_Length": str(place.stat().st_size)}
                self._answer(200, **self._stamp(), **size)
            else:
                self._get(place)

    def _is_signed(self, parts, query):
        signed = [self.command, *(self.headers.get(name) or "" for name in _SIGNED)]
        signed[3] = "" if signed[3] == "0" else signed[3]
        own = sorted(
            (name.lower(), value) for name, value in self.headers.items() if name.lower().startswith("x-ms-")
        )
        signed += [f"{name}:{value}" for name, value in own]
        signed.append(f"/{ACCOUNT}{parts.path}")
        signed += [f"{name.lower()}:{value}" for name, value in sorted(query.items())]
        digest = hmac.digest(base64.b64decode(self.site.key), "\n".join(signed).encode(), "sha256")
        wanted = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        return hmac.compare_digest(self.headers.get("Authorization", ""), wanted)

    @staticmethod
    def _stamp():
        return {"ETag": '"0x1"', "Last_Modified": formatdate(usegmt=True), "x_ms_type": "File"}

    def _make_folder(self, place, kind):
        if place.exists():
            self._refuse(409, "ShareAlreadyExists" if kind == "share" else "ResourceAlreadyExists")
        elif not place.parent.is_dir():
            self._refuse(404, "ParentNotFound")
        else:
            place.mkdir()
            # On a real share, every client that mounts the share may write into every folder.
            place.chmod(0o1777)
            self._answer(201, **self._stamp())

    def _put(self, place, part, body):
        if not place.parent.is_dir():
            self._refuse(404, "ParentNotFound")
        elif part == "range":
            begin, _, end = self.headers["x-ms-range"].removeprefix("bytes=").partition("-")
            assert int(end) - int(begin) + 1 == len(body)
            with place.open("r+b") as file:
                file.seek(int(begin))
                file.write(body)
            self._answer(201, **self._stamp())
        elif part == "rename":
            source = unquote(urlsplit(self.headers["x-ms-file-rename-source"]).path).strip("/")
            if place.exists() and self.headers.get("x-ms-file-rename-replace-if-exists") != "true":
                self._refuse(409, "ResourceAlreadyExists")
            else:
                (self.site.shares / source).replace(place)
                self._answer(200, **self._stamp())
        else:
            assert part == ""
            # As in Azure, other clients see a file of the full size that contains zeros, until the client has written the
            # content.
            with place.open("wb") as file:
                file.truncate(int(self.headers["x-ms-content-length"]))
            place.chmod(0o666)
            self._answer(201, **self._stamp())

    def _list(self, place):
        if not place.is_dir():
            self._refuse(404, "ResourceNotFound")
            return
        rows = []
        for each in sorted(place.iterdir()):
            size = "" if each.is_dir() else f"<Content-Length>{each.stat().st_size}</Content-Length>"
            tag = "Directory" if each.is_dir() else "File"
            rows.append(f"<{tag}><Name>{escape(each.name)}</Name><Properties>{size}</Properties></{tag}>")
        text = (
            f"<?xml version='1.0' encoding='utf-8'?><EnumerationResults><Entries>{''.join(rows)}</Entries>"
            "<NextMarker /></EnumerationResults>"
        )
        self._answer(200, text.encode(), "application/xml")

    def _remove(self, place):
        if place.is_dir():
            if any(place.iterdir()):
                self._refuse(409, "DirectoryNotEmpty")
                return
            shutil.rmtree(place)
        else:
            place.unlink()
        self._answer(202)

    def _get(self, place):
        content = place.read_bytes()
        wanted = self.headers.get("x-ms-range") or self.headers.get("Range")
        if wanted is None:
            self._answer(200, content, "application/octet-stream", **self._stamp())
            return
        begin, _, end = wanted.removeprefix("bytes=").partition("-")
        if int(begin) >= len(content):
            self._refuse(416, "InvalidRange")
            return
        piece = content[int(begin) : int(end) + 1 if end else None]
        shown = f"bytes {begin}-{int(begin) + len(piece) - 1}/{len(content)}"
        self._answer(206, piece, "application/octet-stream", Content_Range=shown, **self._stamp())


def write_certificate(path, hosts):
    """A TLS context for these hosts. Its certificate and key are written to the path. Clients must trust the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "Azure of a test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(serialization.Encoding.PEM, *form)
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path)
    return tls
