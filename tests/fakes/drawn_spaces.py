"""Hypothesis strategies that generate search spaces in the format of a search space file."""

from hypothesis import strategies as st

from nni_manager.config.search_space import TYPES

finite = st.floats(-1e6, 1e6)
widths = st.floats(1e-3, 1e6)


@st.composite
def parameters_raw(draw, depth=2):
    """A hyper-parameter of any type, in the format of a search space file. Choices are nested up to `depth` levels."""
    kind = draw(st.sampled_from(TYPES))
    if kind == "choice":
        plain = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
        options = plain if depth == 0 else plain | nested_raw(depth - 1)
        return {"_type": kind, "_value": draw(st.lists(options, min_size=1, max_size=4))}
    if kind == "randint":
        low = draw(st.integers(-(10**9), 10**9))
        return {"_type": kind, "_value": [low, low + draw(st.integers(1, 10**9))]}
    if "normal" in kind:
        numbers = [draw(st.floats(-50, 50)), draw(st.floats(1e-3, 5))]
    else:
        low = draw(st.floats(1e-6, 1e6) if "log" in kind else finite)
        numbers = [low, low + draw(widths)]
    return {"_type": kind, "_value": numbers + ([draw(st.floats(1e-3, 1e6))] if kind.startswith("q") else [])}


def nested_raw(depth):
    children = st.dictionaries(
        st.text(max_size=3).filter(lambda name: name != "_name"), parameters_raw(depth), max_size=2
    )
    return st.builds(lambda name, inner: {"_name": name, **inner}, st.text(max_size=2), children)


spaces_raw = st.dictionaries(st.text(max_size=3), parameters_raw(), min_size=1, max_size=3)
