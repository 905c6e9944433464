"""BatchTuner: the entries of a list, in order."""

from __future__ import annotations

from typing import Any

from nni_manager.config.algorithm import BuiltInTuner
from nni_manager.config.search_space import Choice, SearchSpace
from nni_manager.tuner.enumerating import EnumeratingTuner, Points


class _Entries(Points):
    """The options of the only choice, unchanged. `_reason_against` must accept the space."""

    def __init__(self, space: SearchSpace) -> None:
        (choice,) = space.parameters.values()
        assert isinstance(choice, Choice)
        self._entries: tuple[Any, ...] = choice.options

    def has(self, index: int) -> bool:
        """See `Points`."""
        return index < len(self._entries)

    def at(self, index: int) -> dict[str, Any]:
        """See `Points`."""
        return dict(self._entries[index])


def _reason_against(space: SearchSpace) -> str | None:
    batch = space.parameters.get("combine_params")
    if (
        len(space.parameters) == 1
        and isinstance(batch, Choice)
        and all(isinstance(each, dict) for each in batch.options)
    ):
        return None
    return (
        "cannot use the search space: BatchTuner requires one choice of mappings as the search space; write the search "
        'space as {"combine_params": {"_type": "choice", "_value": [{"lr": 0.1, "size": 16}, {"lr": 0.2, "size": 32}]}}'
    )


DECLARED = BuiltInTuner(
    "BatchTuner",
    __doc__,
    lambda space, *_: EnumeratingTuner(_Entries(space)),
    aliases=("Batch",),
    learns=False,
    has_several_objectives=True,
    in_space=lambda parameters: {"combine_params": parameters},
    reason_against=_reason_against,
)
