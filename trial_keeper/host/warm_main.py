"""The script that Python runs as a warm interpreter: it only executes `warm_interpreter.py`, which is beside this file.

Python keeps the syntax tree of its main script until the end. For a long script that is hundreds of pages of memory, and each
trial, which is a fork, would copy them to free them. This file defines no names: a trial's `__main__` starts as this one.
"""

exec(
    compile(
        __loader__.get_data(__file__[: -len("main.py")] + "interpreter.py"),  # type: ignore[name-defined]
        __file__[: -len("main.py")] + "interpreter.py",
        "exec",
        dont_inherit=True,
    )
)
