"""Changes to a running experiment: converts requests of NNI's interfaces into a new configuration.

Source: NNI v2.0 and v3.0, PUT /experiment and `nnictl update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.alias_generators import to_snake

from nni_manager.config.algorithms import reason_against_space
from nni_manager.config.diagnostics import ConfigInvalid, Diagnostic, shown
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.schema import Key, keys_in
from nni_manager.config.search_space import parse_search_space
from nni_manager.config.shared_keys import SharedKeys
from nni_manager.config.units import duration_s
from nni_manager.errors import UserError
from nni_sdk.nesting import NestedTooDeeply, parsed_json

_MOST = 99_999
_A_DURATION = "a number of seconds, or a whole number and one of s, m, h, d such as 90m"


class ChangeInvalid(UserError):
    """cannot apply this change to the experiment; fix the value that the message names"""


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ValueError(value)
    return value


def _seconds(value: Any) -> float | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)  # seconds, as from a command line
    if isinstance(value, bool) or not isinstance(value, int | float):
        return duration_s(value)
    # At most 99,999 days, which every clock can represent.
    if not 0 < value <= _MOST * 86400:
        raise ValueError(value)
    return float(value)


_NAMES = {
    "TRIAL_CONCURRENCY": "trialConcurrency",
    "MAX_TRIAL_NUM": "maxTrialNumber",
    "MAX_EXEC_DURATION": "maxExperimentDuration",
    # No version of NNI can change this limit of a running experiment.
    "MAX_TRIAL_DURATION": "maxTrialDuration",
}
LIMITS: Mapping[str, Key] = {
    update_type: key
    for update_type, name in _NAMES.items()
    for key in keys_in(SharedKeys)
    if key.path == (name,)
}
"""The keys of limits that can change, by their names in NNI's interfaces."""
SEARCH_SPACE = "SEARCH_SPACE"
UPDATE_TYPES = (*LIMITS, SEARCH_SPACE)


def changed(config: ExperimentSpec, update_type: str, params: Mapping[str, Any]) -> ExperimentSpec:
    """The configuration after a change of this type. Of the profile keys in `params`, only those of this type are read.

    A limit of None means no limit. The search space may be JSON text, which NNI's oldest clients send. NNI's clients send the
    whole profile, and some add the new value under the limit's name in the other schema: of two values, the new one counts.

    Raises:
        ChangeInvalid: the type is unknown, or the value is invalid.
        ConfigInvalid: with every error of the search space.
    """
    if update_type == SEARCH_SPACE:
        return _with_space(config, _values_of(params, ("searchSpace",))[0])
    limit = LIMITS.get(update_type)
    if limit is None:
        raise ChangeInvalid(
            f"cannot change {shown(update_type)}: there is no such update_type; use one of {', '.join(UPDATE_TYPES)}"
        )
    field, names = to_snake(limit.path[0]), tuple(dict.fromkeys((limit.v1[0][-1], limit.path[0])))
    current = getattr(config, field)
    values = [_read_limit(limit, names[0], value) for value in _values_of(params, names)]
    return config.replace(**{field: next((value for value in values if value != current), current)})


def _read_limit(limit: Key, name: str, value: Any) -> Any:
    is_duration = limit.declared.kind == "duration"
    if value is None and not limit.field.is_required():
        return None
    try:
        return _seconds(value) if is_duration else _count(value)
    except ValueError:
        must_be = _A_DURATION if is_duration else limit.declared.what
        raise ChangeInvalid(f"cannot use {name}: {shown(value)} is not valid; write {must_be}") from None


def _values_of(params: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    values = [params[name] for name in names if name in params]
    if not values:
        raise ChangeInvalid(
            f"cannot change {names[0]}: params does not have this key; add it with the new value"
        )
    return values


def _with_space(config: ExperimentSpec, raw: Any) -> ExperimentSpec:
    if isinstance(raw, str):
        try:
            raw = parsed_json(raw)
        except ValueError as error:
            why = error if isinstance(error, NestedTooDeeply) else "not JSON"
            raise ChangeInvalid(
                f"cannot use searchSpace: {shown(raw)} is {why}; send the content of a search space file"
            ) from None
    space = parse_search_space(raw, for_own_class=config.tuner.own is not None)
    if raw == config.search_space_raw:
        return config
    reason = reason_against_space(config.tuner.name, space)
    if reason is not None:
        raise ConfigInvalid([Diagnostic("", None, None, "searchSpace", reason)])
    return config.replace(
        search_space=space,
        search_space_raw=raw,
        search_space_revision=config.search_space_revision + 1,
    )
