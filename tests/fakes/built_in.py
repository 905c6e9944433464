"""The built-in tuners and assessors as parameters of tests."""

import pytest

from nni_manager.config.algorithm import BuiltIn


def names_in(table, is_meant=lambda declared: True):
    """The names of a table of declarations, as test parameters. A test is skipped if the library of its name is missing."""

    def is_here(declared: BuiltIn) -> bool:
        return declared.need is None or declared.need.is_met

    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not is_here(each), reason=f"{name} needs a library that is not here"),
        )
        for name, each in sorted(table.items())
        if is_meant(each)
    ]
