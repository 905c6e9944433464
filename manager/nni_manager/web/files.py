"""The page's files: a fixed set, read when they are first asked for and then kept. They hold nothing secret.

The document names the others by paths that hold the edition of all of them, `/page/<edition>/main.js`. What is there never
changes, so a browser keeps it without asking again: a page that is loaded once more costs the document and the experiment.
"""

import gzip
import importlib.util
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

from nni_manager.web.packing import takes_gzip

FOLDER = Path(__file__).parent / "page"
# The page looks at the address itself, and shows what belongs there.
PLACES = ("/enter", "/oview", "/detail", "/experiment", "/jobs")
CHARTS = "/page/plotly.min.js"
# Not the system's own table, which says of JavaScript what it likes; a browser runs only what is called so.
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
_KEPT_S = 365 * 24 * 3600
# Packed once more they would grow.
_PACKED = (".png", ".woff2")


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes = field(repr=False)
    packed: bytes | None = field(repr=False)
    tag: str
    media_type: str


class Files:
    """Answers by a file's exact path, with any edition or none: no path leads anywhere else."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in _TYPES]
        self._paths: dict[str, Path] = {
            f"/page/{path.relative_to(folder).as_posix()}": path for path in files
        } | dict.fromkeys(PLACES, folder / "index.html")
        if (charts := _chart_library()) is not None:
            self._paths[CHARTS] = charts
        self._read = cache(self._read_anew)

    def __contains__(self, path: str) -> bool:
        """Whether there is a file at this path of an address."""
        return _without_edition(path)[0] in self._paths

    @cached_property
    def edition(self) -> str:
        """Another word when any of the files is another one."""
        digest = sha256()
        for name, path in self._paths.items():
            # Four megabytes come from a package that has another version when they are others.
            content = str(path.stat().st_mtime_ns).encode() if name == CHARTS else path.read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()[:16]

    def answer(self, path: str, headers: Headers) -> Response:
        """The file, which there is; or that the browser has it already, as another version of the manager may have changed it."""
        name, edition = _without_edition(path)
        file = self._read(self._paths[name])
        # A page of before may still ask for its own.
        keep = f"max-age={_KEPT_S}, immutable" if edition == self.edition else "no-cache"
        told = {"ETag": file.tag, "Cache-Control": keep, "Vary": "Accept-Encoding"}
        if file.tag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=told)
        content = file.content
        if file.packed is not None and takes_gzip(headers):
            content, told["Content-Encoding"] = file.packed, "gzip"
        return Response(content, headers=told, media_type=file.media_type)

    def _read_anew(self, path: Path) -> _File:
        content = path.read_bytes()
        if path.suffix == ".html":
            content = content.replace(b'"/page/', f'"/page/{self.edition}/'.encode())
        packed = None if path.suffix in _PACKED else gzip.compress(content, mtime=0)
        return _File(content, packed, f'"{sha256(content).hexdigest()[:32]}"', _TYPES[path.suffix])


def _without_edition(path: str) -> tuple[str, str]:
    """The path as files have it, and the edition that it names; empty: none."""
    match = _EDITION.match(path)
    return (path, "") if match is None else (f"/page/{path[match.end() :]}", match[1])


def _chart_library() -> Path | None:
    """The JavaScript that lies in the wheel of plotly, whose Python takes a second to import; None: it is not installed."""
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / "package_data" / "plotly.min.js").is_file():
            return path
    return None
