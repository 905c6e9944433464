"""What Python is given to run as a warm interpreter: only the way to `warm_interpreter.py`, which lies beside this file.

Python keeps the syntax tree of the file that it was given until its end. Of a long one that is hundreds of pages of memory, and
each trial, which is a fork, would copy them to let go of them. No name of this file's: a trial's `__main__` begins as this one.
"""

exec(
    compile(
        __loader__.get_data(__file__[: -len("main.py")] + "interpreter.py"),  # type: ignore[name-defined]
        __file__[: -len("main.py")] + "interpreter.py",
        "exec",
        dont_inherit=True,
    )
)
