"""Replaces the code of functions in memory by the code of a mutant."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType

from mutant_finder import Mutant

Replacement = tuple[FunctionType, CodeType]


def functions_of(root: str, paths: set[str]) -> dict[str, list[FunctionType]]:
    """All functions in memory that are defined in these files, by path."""
    for path in paths:
        with contextlib.suppress(ImportError):
            importlib.import_module(path.removeprefix("manager/").removesuffix(".py").replace("/", "."))
    files = {f"{root}/{path}": path for path in paths}
    found: dict[str, list[FunctionType]] = {path: [] for path in paths}
    gc.unfreeze()
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename in files:
            found[files[each.__code__.co_filename]].append(each)
    # After gc.freeze(), the garbage collectors of forks ignore all existing objects, so forks share the memory of these objects.
    gc.freeze()
    return found


def replaced_code(
    mutant: Mutant, source: str, root: str, functions: Sequence[FunctionType]
) -> list[Replacement]:
    """The functions that the mutant changes and their changed code; empty if they cannot be replaced in memory.

    `functions`: those of the mutant's file.
    """
    file = f"{root}/{mutant.path}"
    before, after = (
        compile(text, file, "exec", dont_inherit=True) for text in (source, mutant.apply(source))
    )
    found: list[Replacement] = []
    for chain in _changes(before, after, []):
        if not chain[-1][0].co_flags & inspect.CO_OPTIMIZED:
            # The code of a module or of a class body runs only at import, so it cannot be replaced in memory.
            return []
        pairs = [(function, new) for old, new in chain for function in functions if function.__code__ == old]
        if not pairs or any(one.__code__.co_freevars != new.co_freevars for one, new in pairs):
            return []
        found += pairs
    return found


def _changes(
    old: CodeType, new: CodeType, outer: list[tuple[CodeType, CodeType]]
) -> Iterator[list[tuple[CodeType, CodeType]]]:
    """For each code object with changes of its own: the code objects around it, then itself, each before and after."""
    chain = [*outer, (old, new)]
    (own_before, before), (own_after, after) = _parts(old), _parts(new)
    if own_before != own_after:
        yield chain
    if len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from _changes(one, other, chain)


def _parts(code: CodeType) -> tuple[object, list[CodeType]]:
    """What a code object itself does, and the code objects within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_code, names, constants, [each.co_name for each in inner]), inner
