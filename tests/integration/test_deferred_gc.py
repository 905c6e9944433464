"""The garbage collector of a program skips objects that live until the program exits."""

import subprocess
import sys

from deadlines import DEADLINE_S

PROGRAM = """
from nni_manager.startup import deferred_gc
import gc
assert not gc.isenabled()
deferred_gc.start()
assert gc.isenabled()

class Cycle:
    def __init__(self, name):
        self.name, self.itself = name, self

    def __del__(self):
        print(self.name)

Cycle("while it runs")
gc.collect()
Cycle("at its end")
"""


def test_a_program_collects_garbage_while_it_runs_but_not_when_it_exits():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ran.stdout, ran.stderr) == ("while it runs\n", "")
