"""The main script of a warm interpreter. It only executes `warm_interpreter.py`, which is beside this file.

Python keeps the syntax tree of its main script until the end. For a long script that is hundreds of pages of memory. Each trial
is a fork, so freeing the tree would copy these pages. This file defines no names: a trial's `__main__` starts as this module.
"""

exec(
    compile(
        __loader__.get_data(__file__[: -len("main.py")] + "interpreter.py"),  # type: ignore[name-defined]
        __file__[: -len("main.py")] + "interpreter.py",
        "exec",
        dont_inherit=True,
    )
)
