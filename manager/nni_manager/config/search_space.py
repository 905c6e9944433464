"""The search space: parses NNI's JSON into a frozen tree, and checks if parameters lie in it.

Each hyper-parameter is `{"_type": …, "_value": …}`. The docstring of each class defines its type. Quantised types draw
`u` like the continuous type and return `round(u / q) * q` as a float, halves rounded to even. The product is
not corrected: q = 0.1 gives 0.30000000000000004, as in NNI.

Source: NNI v3.0 search space specification and the sampling functions of its SDK.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from nni_manager.config.diagnostics import ConfigInvalid, Diagnostic, key_of, remedy_for_unknown, shown
from nni_manager.config.other_spaces import in_nni_notation
from nni_sdk.nesting import TOO_DEEP, deep_entry
from trial_keeper.frozen_dataclass import dataclass

Path: TypeAlias = tuple[str | int, ...]

# JSON readers and samplers use floats, which cannot represent all larger whole numbers.
MAX_WHOLE_NUMBER = 2**53
# Bound of normal draws: the largest double below 1 is a probability of 8.3 sigma.
FARTHEST_SIGMAS = 8.5
# The logarithm of the largest float.
MAX_EXPONENT = math.log(1.7976931348623157e308)


def multiple_of(u: float, q: float) -> float:
    """The multiple of q nearest to u, halves rounded to even; never minus zero."""
    return round(u / q) * q + 0.0


@dataclass(frozen=True, slots=True)
class Nested:
    """An option of a choice with its own hyper-parameters; sampled as {"_name": name, …}."""

    name: str
    space: SearchSpace


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the options, each with the same probability: any JSON value, or a nested space."""

    options: tuple[Any | Nested, ...]


@dataclass(frozen=True, slots=True)
class RandInt:
    """A whole number from low (inclusive) to high (exclusive)."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Uniform:
    """A float from low to high."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LogUniform:
    """A float from low to high whose logarithm is uniform."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _QuantisedRange:
    low: float
    high: float
    q: float

    def quantised(self, u: float) -> float:
        """The value for a draw u from low to high: the nearest multiple of q, clipped to low and high.

        A bound exactly between two multiples is rounded inwards: (2.5, 5.5, 1) gives 3, 4, 5. Rounding to even would
        give 2.5 for the draw u = 2.5.
        """
        first = math.floor(self.low / self.q + 0.5)
        last = max(first, math.ceil(self.high / self.q - 0.5))
        return min(max(min(max(round(u / self.q), first), last) * self.q + 0.0, self.low), self.high)


@dataclass(frozen=True, slots=True)
class QUniform(_QuantisedRange):
    """The nearest multiple of q to a uniform draw, clipped: (1, 10, 3) gives 1, 3, 6, 9."""


@dataclass(frozen=True, slots=True)
class QLogUniform(_QuantisedRange):
    """The nearest multiple of q to a log-uniform draw, clipped: (1, 100, 7) gives 1 and 7, 14, … 98."""


@dataclass(frozen=True, slots=True)
class Normal:
    """A normally distributed float; not clipped."""

    mu: float
    sigma: float


@dataclass(frozen=True, slots=True)
class QNormal:
    """The nearest multiple of q to a normal draw; not clipped."""

    mu: float
    sigma: float
    q: float


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A positive float whose logarithm is normal with mu and sigma; not clipped."""

    mu: float
    sigma: float


@dataclass(frozen=True, slots=True)
class QLogNormal:
    """The nearest multiple of q to a log-normal draw, zero included; not clipped."""

    mu: float
    sigma: float
    q: float


Parameter: TypeAlias = (
    Choice
    | RandInt
    | Uniform
    | QUniform
    | LogUniform
    | QLogUniform
    | Normal
    | QNormal
    | LogNormal
    | QLogNormal
)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Hyper-parameters by name, in the order of the file."""

    parameters: Mapping[str, Parameter]


def paths_of(space: SearchSpace, above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The names of all hyper-parameters; that of a nested one follows the name of its choice."""
    found: set[tuple[str, ...]] = set()
    for name, parameter in space.parameters.items():
        found.add((*above, name))
        for option in parameter.options if isinstance(parameter, Choice) else ():
            if isinstance(option, Nested):
                found |= paths_of(option.space, (*above, name))
    return found


_NUMERIC: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "randint": (RandInt, ("low", "high")),
    "uniform": (Uniform, ("low", "high")),
    "quniform": (QUniform, ("low", "high", "q")),
    "loguniform": (LogUniform, ("low", "high")),
    "qloguniform": (QLogUniform, ("low", "high", "q")),
    "normal": (Normal, ("mu", "sigma")),
    "qnormal": (QNormal, ("mu", "sigma", "q")),
    "lognormal": (LogNormal, ("mu", "sigma")),
    "qlognormal": (QLogNormal, ("mu", "sigma", "q")),
}
TYPES = ("choice", *_NUMERIC)

_EXAMPLE = '{"_type": "uniform", "_value": [0, 1]}'


def parse_search_space(raw: Any, *, for_own_class: bool = False) -> SearchSpace:
    """The search space that a JSON document describes; `for_own_class` as in `read_search_space`.

    Raises:
        ConfigInvalid: with every error of the document, without file and line.
    """
    space, problems = read_search_space(raw, for_own_class=for_own_class)
    if space is None:
        raise ConfigInvalid(Diagnostic("", None, None, key_of(path), message) for path, message in problems)
    return space


def read_search_space(
    raw: Any, *, for_own_class: bool = False
) -> tuple[SearchSpace | None, list[tuple[Path, str]]]:
    """The search space, or None and every error with its path in the document.

    `for_own_class`: the tuner is a class of the user, so a mapping without the built-in types is an empty search space.
    """
    if for_own_class and isinstance(raw, dict) and not _has_usual_form(raw):
        return SearchSpace({}), []
    reader = _Reader()
    if not isinstance(raw, dict):
        reader.refuse((), f"the search space: {shown(raw)} is not a mapping", f'write {{"lr": {_EXAMPLE}}}')
        return None, reader.problems
    if (deep := deep_entry(raw)) is not None:
        path = (str(deep),)  # YAML allows other keys
        reader.refuse(path, f"{key_of(path)}: it is {TOO_DEEP}", "make it flatter")
        return None, reader.problems
    if not raw:
        reader.refuse((), "the search space: it names no hyper-parameter", f'write {{"lr": {_EXAMPLE}}}')
    space = reader.space((), raw)
    return (None if reader.problems else space), reader.problems


def _has_usual_form(raw: Mapping[str, Any]) -> bool:
    return bool(raw) and all(isinstance(each, dict) and each.get("_type") in TYPES for each in raw.values())


class _Reader:
    """Reads the tree and collects errors; a placeholder replaces each invalid part."""

    def __init__(self) -> None:
        self.problems: list[tuple[Path, str]] = []

    def refuse(self, path: Path, what: str, remedy: str) -> None:
        """Record one error."""
        self.problems.append((path, f"cannot use {what}; {remedy}"))

    def space(self, path: Path, raw: Mapping[Any, Any]) -> SearchSpace:
        """The hyper-parameters of the mapping at `path`."""
        found: dict[str, Parameter] = {}
        for name, value in raw.items():
            # YAML allows keys such as 1 and true; trials read JSON, where keys are text.
            here = (*path, str(name))
            if not isinstance(name, str):
                self.refuse(here, f"{key_of(here)}: a name must be text", f'write "{name}"')
            found[str(name)] = self.parameter(here, value)
        return SearchSpace(found)

    def parameter(self, path: Path, raw: Any) -> Parameter:
        """The hyper-parameter at `path`."""
        key, remedy = key_of(path), f"write a hyper-parameter as {_EXAMPLE}"
        if not isinstance(raw, dict):
            return self._invalid(path, f"{key}: {shown(raw)} is not a mapping", remedy)
        if raw.keys() == {"type", "value"}:
            translated = {"_type": raw["type"], "_value": raw["value"]}
            return self._invalid(
                path, f"{key}: type and value start with an underscore", f"write {_in_json(translated)}"
            )
        if raw.keys().isdisjoint(("_type", "_value")) and (other := in_nni_notation(raw)) is not None:
            library, translated = other
            what = f"{key}: it has the notation of {library}"
            return self._invalid(path, what, f"write {_in_json(translated)}")
        for extra in (str(each) for each in raw if each not in ("_type", "_value")):
            self.refuse((*path, extra), f"{key}.{extra}: there is no such key", "keep only _type and _value")
        missing = [name for name in ("_type", "_value") if name not in raw]
        if missing:
            return self._invalid(path, f"{key}: {' and '.join(missing)} missing", remedy)
        kind, values = raw["_type"], raw["_value"]
        if kind == "choice":
            return self._choice((*path, "_value"), key, values)
        if kind == "mutable_layer":
            what = f"{key}: architecture search (mutable_layer) is not supported"
            return self._invalid(path, what, "use choice")
        if not isinstance(kind, str) or kind not in _NUMERIC:
            remedy = remedy_for_unknown(kind if isinstance(kind, str) else "", TYPES)
            return self._invalid((*path, "_type"), f"{key}: {shown(kind)} is not a type", remedy)
        return self._numeric((*path, "_value"), key, kind, values)

    def _invalid(self, path: Path, what: str, remedy: str) -> Choice:
        """Record one error; the result is the placeholder."""
        self.refuse(path, what, remedy)
        return Choice(())

    def _choice(self, path: Path, key: str, values: Any) -> Choice:
        if not isinstance(values, list):
            remedy = "write a list of options, such as [1, 2]"
            return self._invalid(path, f"{key}: {shown(values)} is not a list", remedy)
        if not values:
            self.refuse(path, f"{key}: the choice has no option", "list at least one")
        return Choice(tuple(self._option((*path, i), f"{key}[{i}]", value) for i, value in enumerate(values)))

    def _option(self, path: Path, key: str, value: Any) -> Any | Nested:
        if not (isinstance(value, dict) and "_name" in value):
            if not is_json(value):
                remedy = "put it in quotes, or write a finite number"
                self.refuse(path, f"{key}: {shown(value)} is not a JSON value", remedy)
            return value
        name = value["_name"]
        if not isinstance(name, str):
            self.refuse((*path, "_name"), f"{key}._name: {shown(name)} is not text", 'write "_name": "text"')
        inner = {child: raw for child, raw in value.items() if child != "_name"}
        return Nested(str(name), self.space(path, inner))

    def _numeric(self, path: Path, key: str, kind: str, values: Any) -> Parameter:
        made, names = _NUMERIC[kind]
        form = f"[{', '.join(names)}]"
        if not isinstance(values, list) or len(values) != len(names):
            what = (
                f"has {len(values)} item{'' if len(values) == 1 else 's'}"
                if isinstance(values, list)
                else "is not a list"
            )
            return self._invalid(path, f"{key}: {shown(values)} {what}", f"{kind} requires {form}")
        whole = kind == "randint"
        wrong = [value for value in values if not (_is_whole(value) if whole else _is_number(value))]
        for value in wrong:
            noun = "whole number up to 2**53" if whole else "finite number"
            self.refuse(path, f"{key}: {shown(value)} is not a {noun}", f"{kind} requires {form}")
        if wrong:
            return Choice(())
        numbers = [int(value) if whole else float(value) for value in values]
        reasons = [*_reasons_against(kind, dict(zip(names, numbers, strict=True)), values)]
        for what, remedy in reasons:
            self.refuse(path, f"{key}: {what}", remedy)
        parameter: Parameter = Choice(()) if reasons else made(*numbers)
        return parameter


def _reasons_against(
    kind: str, number: Mapping[str, float], written: Sequence[Any]
) -> Iterator[tuple[str, str]]:
    """The errors of the numbers, each with its remedy. `written` holds the numbers as the user wrote them."""
    if "low" in number:
        low, high = number["low"], number["high"]
        if low >= high:
            word = "swap them" if low > high else "widen the range"
            yield f"low {written[0]} is not below high {written[1]}", f"{word} or use choice"
        if "log" in kind and low <= 0:
            yield f"low {written[0]} is not above 0", f"{kind} requires a positive low, such as 0.0001"
        if math.isinf(high - low):
            what = f"the range from {written[0]} to {written[1]} is too wide for a float"
            yield what, "narrow the range"
        farthest = max(abs(low), abs(high))
    else:
        mu, sigma = number["mu"], number["sigma"]
        if sigma <= 0:
            yield f"sigma {written[1]} is not above 0", "write a positive sigma or use choice"
        farthest = abs(mu) + FARTHEST_SIGMAS * abs(sigma)
        if "log" in kind:
            if farthest > MAX_EXPONENT:
                what = f"exp({written[0]} + {FARTHEST_SIGMAS} * {written[1]}) is too large for a float"
                yield what, "lower mu or sigma"
            farthest = math.exp(min(farthest, MAX_EXPONENT))
        if math.isinf(farthest):
            what = f"mu {written[0]} with sigma {written[1]} exceeds the range of floats"
            yield what, "lower mu or sigma"
    if "q" in number:
        q = number["q"]
        if q <= 0:
            yield f"q {written[2]} is not above 0", f"write a positive q or use {kind[1:]}"
        elif math.isfinite(farthest) and math.isinf(farthest / q):
            what = f"q {written[2]} is too small for values of this size"
            yield what, f"write a larger q or use {kind[1:]}"


def is_json(value: Any) -> bool:
    """True if JSON can represent this value. YAML also has dates, bytes, sets, infinities and keys of any type."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, bool | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_whole(value: Any) -> bool:
    return _is_number(value) and float(value).is_integer() and abs(value) <= MAX_WHOLE_NUMBER


def contains(space: SearchSpace, parameters: Mapping[str, Any]) -> list[str]:
    """The reasons why `parameters` is not a sample of `space`; empty when it is. Only a user's class knows an empty space."""
    return _problems_within(space, parameters, ()) if space.parameters else []


def _problems_within(space: SearchSpace, parameters: Any, path: Path) -> list[str]:
    if not isinstance(parameters, Mapping):
        return [f"{key_of(path)}: {shown(parameters)} is not a mapping"]
    problems = [
        f"{key_of((*path, name))} is not in the space" for name in parameters if name not in space.parameters
    ]
    for name, parameter in space.parameters.items():
        here = (*path, name)
        if name not in parameters:
            problems.append(f"{key_of(here)} is missing")
        elif isinstance(parameter, Choice):
            problems += _problems_of_choice(parameter, parameters[name], here)
        elif not (_is_number(parameters[name]) and _supports(parameter, parameters[name])):
            problems.append(f"{key_of(here)}: {shown(parameters[name])} is outside {_written(parameter)}")
    return problems


def _problems_of_choice(choice: Choice, value: Any, path: Path) -> list[str]:
    name = value.get("_name") if isinstance(value, Mapping) else None
    nested = [option for option in choice.options if isinstance(option, Nested) and option.name == name]
    if nested:
        inner = {key: child for key, child in value.items() if key != "_name"}
        return min((_problems_within(option.space, inner, path) for option in nested), key=len)
    plain = [option for option in choice.options if not isinstance(option, Nested)]
    if any(same_json(option, value) for option in plain):
        return []
    return [f"{key_of(path)}: {shown(value)} is not an option"]


def same_json(left: Any, right: Any) -> bool:
    """True if both are the same JSON text. In Python True == 1; in JSON they differ. False for what is no JSON, such as dates."""
    try:
        return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    except TypeError:
        return False


def _written(parameter: Parameter) -> str:
    """A numeric parameter in the user's notation: uniform [0, 1]."""
    word, names = next((word, names) for word, (kind, names) in _NUMERIC.items() if type(parameter) is kind)
    numbers = [getattr(parameter, name) for name in names]
    return f"{word} {[int(each) if _is_whole(each) else each for each in numbers]}"


def _supports(parameter: Parameter, value: float) -> bool:
    match parameter:
        case RandInt(low, high):
            return isinstance(value, int) and low <= value < high
        case Uniform(low, high) | LogUniform(low, high):
            return low <= value <= high
        case QUniform(low, high, q) | QLogUniform(low, high, q):
            return parameter.quantised(value) == value if _is_exact(value, q) else low <= value <= high
        case QNormal(_, _, q):
            return not _is_exact(value, q) or multiple_of(value, q) == value
        case QLogNormal(_, _, q):
            return value >= 0 and (not _is_exact(value, q) or multiple_of(value, q) == value)
        case LogNormal():
            return value >= 0
        case _:
            return True


def _is_exact(value: float, q: float) -> bool:
    """True if floats near `value` are precise enough to distinguish multiples of q."""
    return abs(value / q) < 2**50


def _in_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
