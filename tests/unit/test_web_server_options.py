"""The options of a web server, and how one process passes the options to another process on the command line."""

import argparse
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nni_manager.support.server_tls import TlsFiles
from nni_manager.support.web_server_options import WebServerOptions

_TEXTS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1)


_PATHS = _TEXTS.map(lambda text: Path("/tls") / text.replace("/", "_"))


@given(
    st.builds(
        WebServerOptions,
        host=st.from_regex(r"[a-z0-9.:]+", fullmatch=True),
        url_prefix=_TEXTS | st.just(""),
        require_token=st.booleans(),
        tls=st.none() | st.builds(TlsFiles, _PATHS, _PATHS),
    )
)
def test_the_command_line_of_a_server_contains_all_its_options(options):
    parser = argparse.ArgumentParser()
    WebServerOptions.add_to(parser)
    assert WebServerOptions.of(parser.parse_args(options.arguments())) == options
