"""The page's files: a fixed set, cached in memory on first use. They contain nothing secret.

The HTML document refers to the others by paths with the edition of all files, `/page/<edition>/main.js`. Their content never
changes, so browsers cache them without revalidation. A reload transfers only the document and the experiment.
"""

import gzip
import importlib.util
import re
from dataclasses import field
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

from nni_manager.web.compression import takes_gzip
from trial_keeper.frozen_dataclass import dataclass

FOLDER = Path(__file__).parent / "page"
# All of these addresses serve the same document; the page's router reads the address.
PLACES = ("/enter", "/oview", "/detail", "/experiment", "/jobs")
CHARTS = "/page/plotly.min.js"
# Not the system's MIME table, which varies for JavaScript; browsers run scripts only with the correct type.
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
_EDITION = re.compile(r"/page/([0-9a-f]{16})/")
# Plotly adds styles for maps to the document, unless they are there. The page has no maps, and its policy forbids such styles.
_STYLES_OF_MAPS = re.compile(rb'if\(!document\.getElementById\("[0-9a-f]{64}"\)\)')
_MAX_AGE_S = 365 * 24 * 3600
# Already compressed formats.
_PACKED = (".png", ".woff2")


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes = field(repr=False)
    packed: bytes | None = field(repr=False)
    tag: str
    media_type: str


class Files:
    """Serves files by their exact path, with any edition or none. No other path is accepted."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in _TYPES]
        self._paths: dict[str, Path] = {
            f"/page/{path.relative_to(folder).as_posix()}": path for path in files
        } | dict.fromkeys(PLACES, folder / "index.html")
        if (charts := _chart_library()) is not None:
            self._paths[CHARTS] = charts
        self._read = cache(self._load)

    def __contains__(self, path: str) -> bool:
        """True if a file exists at this URL path."""
        return _without_edition(path)[0] in self._paths

    @cached_property
    def edition(self) -> str:
        """A hash that changes with any of the files."""
        digest = sha256()
        for name, path in self._paths.items():
            # 4 MB from an installed package: its modification time replaces the content in the hash.
            content = str(path.stat().st_mtime_ns).encode() if name == CHARTS else path.read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()[:16]

    def answer(self, path: str, headers: Headers, url_prefix: str = "", home: str | None = None) -> Response:
        """The response with a file that must exist, or 304 if the browser's copy is current.

        `url_prefix`: the path before that of each file, in the document's references. `home`: the path at which the browser logs
        in, if that is not the same.
        """
        name, edition = _without_edition(path)
        file = self._read(self._paths[name])
        if file.media_type == "text/html":
            content = file.content.replace(b'"/page/', f'"{url_prefix}/page/{self.edition}/'.encode())
            if home is not None:
                content = content.replace(b"<html ", f'<html data-home="{home}" '.encode(), 1)
            file = _file(content, file.media_type)
        # A page of an earlier version may still request its own edition.
        cache_control = f"max-age={_MAX_AGE_S}, immutable" if edition == self.edition else "no-cache"
        sent_headers = {"ETag": file.tag, "Cache-Control": cache_control, "Vary": "Accept-Encoding"}
        if file.tag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=sent_headers)
        content = file.content
        if file.packed is not None and takes_gzip(headers):
            content, sent_headers["Content-Encoding"] = file.packed, "gzip"
        return Response(content, headers=sent_headers, media_type=file.media_type)

    def content(self, path: str) -> bytes:
        """The content of a file that must exist."""
        return self._read(self._paths[path]).content

    def _load(self, path: Path) -> _File:
        content = path.read_bytes()
        if path == self._paths.get(CHARTS):
            content = _STYLES_OF_MAPS.sub(b"if(!1)", content)
        return _file(content, _TYPES[path.suffix], is_packed=path.suffix in _PACKED)


def _file(content: bytes, media_type: str, *, is_packed: bool = False) -> _File:
    packed = None if is_packed else gzip.compress(content, mtime=0)
    return _File(content, packed, f'"{sha256(content).hexdigest()[:32]}"', media_type)


def _without_edition(path: str) -> tuple[str, str]:
    """The path without its edition, and the edition; empty if there is none."""
    match = _EDITION.match(path)
    return (path, "") if match is None else (f"/page/{path[match.end() :]}", match[1])


def _chart_library() -> Path | None:
    """The JavaScript file of the plotly package, or None without the package. Does not import it, which takes 1 s."""
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / "package_data" / "plotly.min.js").is_file():
            return path
    return None
