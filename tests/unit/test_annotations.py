"""Annotations: the search space, the generated code, and the errors of invalid annotations."""

import itertools
import json
import random
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nni_sdk.trial
from nni_manager.config.annotations import ValueMissing, read_annotations, with_values
from nni_sdk.errors import ParameterAbsent
from nni_sdk.records import decode
from nni_sdk.trial import TrialContext

TYPES = {
    "randint": [1, 10],
    "uniform": [0.1, 0.5],
    "quniform": [1, 10, 2],
    "loguniform": [1e-5, 0.1],
    "qloguniform": [1, 100, 7],
    "normal": [-1.5, 2],
    "qnormal": [0, 1, 0.5],
    "lognormal": [0, 1],
    "qlognormal": [0, 1, 2],
}


def lines(text):
    return textwrap.dedent(text).lstrip("\n")


def read(text, module="train"):
    return read_annotations(text.encode() if isinstance(text, str) else text, module, f"{module}.py")


def generated(text):
    found = read(text)
    assert [str(error) for error in found.diagnostics] == []
    assert found.generated is not None
    return found.generated.decode()


def diagnostics(text):
    found = read(text)
    assert found.generated is None
    return [str(error) for error in found.diagnostics]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs generated code as a trial with the given parameters. It returns the global names of the code
    and the reported results.
    """

    def run_code(code, parameters):
        content = {"parameter_id": 0, "parameter_source": "algorithm", "parameters": parameters}
        (tmp_path / "parameter.cfg").write_text(json.dumps(content))
        environ = {"NNI_PLATFORM": "local", "NNI_TRIAL_JOB_ID": "tRiAl", "NNI_SYS_DIR": str(tmp_path)}
        monkeypatch.setattr(nni_sdk.trial, "_trial", TrialContext(environ))
        names = {"__name__": "train", "reported": []}
        exec(compile(code, "train.py", "exec"), names)
        metrics = tmp_path / ".nni" / "metrics"
        if metrics.exists():
            names["reported"] = [
                (each.type, json.loads(each.value)) for each in decode(metrics.read_bytes(), 0).records
            ]
        return names

    return run_code


# ---- one case per form: the code, its search space, parameters, the code with its values, and the resulting names


class Form:
    def __init__(self, code, space, parameters, filled_in, *, then):
        self.code, self.filled_in = lines(code), lines(filled_in)
        self.space, self.parameters, self.then = space, parameters, then


def choice(*values):
    return {"_type": "choice", "_value": list(values)}


FORMS = {
    "literals": Form(
        """
        '''@nni.variable(nni.choice(16, "a", None, True, -0.5), name=x)'''
        x = 5  # as it was
        """,
        {"train/x/choice": choice(16, "a", None, True, -0.5)},
        {"train/x/choice": True},
        """
        '''@nni.variable(nni.choice(16, "a", None, True, -0.5), name=x)'''
        x = True  # as it was
        """,
        then={"x": True},
    ),
    "expressions, of which only the chosen one is evaluated": Form(
        """
        lr = 3
        '''@nni.variable(nni.choice(lr * 2, (1, 2), nowhere(), 0.5, lambda: 1), name=x)'''
        x = 5
        """,
        {"train/x/choice": choice("lr * 2", "(1, 2)", "nowhere()", 0.5, "lambda: 1")},
        {"train/x/choice": "lr * 2"},
        """
        lr = 3
        '''@nni.variable(nni.choice(lr * 2, (1, 2), nowhere(), 0.5, lambda: 1), name=x)'''
        x = lr * 2
        """,
        then={"x": 6},
    ),
    "an attribute, in a method of a class": Form(
        """
        class Net:
            '''Doc.'''
            def __init__(self):
                '''@nni.variable(nni.uniform(0, 1), name=self.lr)'''
                self.lr = 0.1
        lr = Net().lr
        """,
        {"train/self.lr/uniform": {"_type": "uniform", "_value": [0, 1]}},
        {"train/self.lr/uniform": 0.25},
        """
        class Net:
            '''Doc.'''
            def __init__(self):
                '''@nni.variable(nni.uniform(0, 1), name=self.lr)'''
                self.lr = 0.25
        lr = Net().lr
        """,
        then={"lr": 0.25},
    ),
    "an item": Form(
        """
        options = {}
        '''@nni.variable(nni.choice(1, 2), name=options["lr"])'''
        options['lr'] = 1
        """,
        {"train/options['lr']/choice": choice(1, 2)},
        {"train/options['lr']/choice": 2},
        """
        options = {}
        '''@nni.variable(nni.choice(1, 2), name=options["lr"])'''
        options['lr'] = 2
        """,
        then={"options": {"lr": 2}},
    ),
    "the names of a class, which a function in it would not see": Form(
        """
        class Net:
            A = 3
            '''@nni.variable(nni.choice(A, 5), name=width)'''
            width: int = A
            '''@nni.function_choice(abs(A), int(A), name=abs)'''
            height = abs(A)
        width = Net.width
        """,
        {"train/width/choice": choice("A", 5), "train/abs/function_choice": choice("abs(A)", "int(A)")},
        {"train/width/choice": "A", "train/abs/function_choice": "int(A)"},
        """
        class Net:
            A = 3
            '''@nni.variable(nni.choice(A, 5), name=width)'''
            width: int = A
            '''@nni.function_choice(abs(A), int(A), name=abs)'''
            height = int(A)
        width = Net.width
        """,
        then={"width": 3},
    ),
    "a nested function below a decorator, with a type and a future import": Form(
        '''
        """What it does."""
        from __future__ import annotations
        import functools
        def outer():
            @functools.cache
            def inner() -> int:
                """@nni.variable(nni.randint(1, 10), name=n)"""
                n: Missing = 3
                return n
            return inner()
        n = outer()
        ''',
        {"train/n/randint": {"_type": "randint", "_value": [1, 10]}},
        {"train/n/randint": 7},
        '''
        """What it does."""
        from __future__ import annotations
        import functools
        def outer():
            @functools.cache
            def inner() -> int:
                """@nni.variable(nni.randint(1, 10), name=n)"""
                n: Missing = 7
                return n
            return inner()
        n = outer()
        ''',
        then={"n": 7},
    ),
    "a value over several lines": Form(
        """
        '''@nni.variable(nni.choice(
               1,   # one
               2), name=x)'''
        x = max([3,
                 4]) + \\
            5
        import inspect; line = inspect.currentframe().f_lineno
        """,
        {"train/x/choice": choice(1, 2)},
        {"train/x/choice": 2},
        """
        '''@nni.variable(nni.choice(
               1,   # one
               2), name=x)'''
        x = (2

        )
        import inspect; line = inspect.currentframe().f_lineno
        """,
        then={"x": 2, "line": 7},
    ),
    "statements that share a line, in blocks of all kinds": Form(
        """
        try:
            raise ValueError
        except ValueError:
            '''@nni.variable(nni.choice(1, 2), name=a)'''; a = 0
        else: pass
        finally:
            "@nni.variable(nni.choice(1, 2), name=b)"; b = 0
        for i in ():
            pass
        else:
            if 0: pass
            elif 1:
                with open("/dev/null") as f:
                    '''@nni.variable(nni.choice(1, 2), name=c)'''; c = 0
        match 1:
            case 1:
                '''@nni.variable(nni.choice(1, 2), name=d)'''
                d = 0
        """,
        {f"train/{name}/choice": choice(1, 2) for name in "abcd"},
        {f"train/{name}/choice": 2 for name in "abcd"},
        """
        try:
            raise ValueError
        except ValueError:
            '''@nni.variable(nni.choice(1, 2), name=a)'''; a = 2
        else: pass
        finally:
            "@nni.variable(nni.choice(1, 2), name=b)"; b = 2
        for i in ():
            pass
        else:
            if 0: pass
            elif 1:
                with open("/dev/null") as f:
                    '''@nni.variable(nni.choice(1, 2), name=c)'''; c = 2
        match 1:
            case 1:
                '''@nni.variable(nni.choice(1, 2), name=d)'''
                d = 2
        """,
        then=dict.fromkeys("abcd", 2),
    ),
    "a call among others": Form(
        """
        def f(a): return a
        def g(a): return -a
        '''@nni.function_choice(f(1), g(2), f(3) + 1, name=f)'''
        x = [2 * f(10), g(
            2), abs(f(f(4)))]
        """,
        {"train/f/function_choice": choice("f(1)", "g(2)", "f(3) + 1")},
        {"train/f/function_choice": "f(3) + 1"},
        """
        def f(a): return a
        def g(a): return -a
        '''@nni.function_choice(f(1), g(2), f(3) + 1, name=f)'''
        x = [2 * (f(3) + 1), ((f(3) + 1)
        ), abs((f(3) + 1))]
        """,
        then={"x": [8, 4, 4]},
    ),
    "a method, in a statement with a block that has an annotation of its own": Form(
        """
        import math
        '''@nni.function_choice(math.floor(2.5), math.ceil(2.5), name=math.floor)'''
        for i in range(math.floor(1.5)):
            '''@nni.variable(nni.choice(7, 8), name=x)'''
            x = math.floor(0.5)
            y = math.floor(0.5)
        """,
        {
            "train/math.floor/function_choice": choice("math.floor(2.5)", "math.ceil(2.5)"),
            "train/x/choice": choice(7, 8),
        },
        {"train/math.floor/function_choice": "math.ceil(2.5)", "train/x/choice": 8},
        """
        import math
        '''@nni.function_choice(math.floor(2.5), math.ceil(2.5), name=math.floor)'''
        for i in range(math.ceil(2.5)):
            '''@nni.variable(nni.choice(7, 8), name=x)'''
            x = 8
            y = math.ceil(2.5)
        """,
        then={"i": 2, "x": 8, "y": 3},
    ),
    "without a name": Form(
        """
        '''@nni.variable(nni.choice(1, 2))'''
        x = 0
        '''@nni.function_choice(abs(-1), abs(-2))'''
        y = abs(-1) + abs(-3)
        """,
        {"train/__line1/choice": choice(1, 2), "train/__line3/function_choice": choice("abs(-1)", "abs(-2)")},
        {"train/__line1/choice": 2, "train/__line3/function_choice": "abs(-2)"},
        """
        '''@nni.variable(nni.choice(1, 2))'''
        x = 2
        '''@nni.function_choice(abs(-1), abs(-2))'''
        y = abs(-2) + abs(-3)
        """,
        then={"x": 2, "y": 5},
    ),
    "one hyper-parameter for two variables of a name": Form(
        """
        def f():
            '''@nni.variable(nni.choice(1, 2), name=n)'''
            n = 0
            return n
        '''@nni.variable(nni.choice(1, 2), name=n)'''
        n = 0
        both = f() + n
        """,
        {"train/n/choice": choice(1, 2)},
        {"train/n/choice": 2},
        """
        def f():
            '''@nni.variable(nni.choice(1, 2), name=n)'''
            n = 2
            return n
        '''@nni.variable(nni.choice(1, 2), name=n)'''
        n = 2
        both = f() + n
        """,
        then={"both": 4},
    ),
    "reports and parameters, with f-strings and strings that are none": Form(
        '''
        """@nni.get_next_parameter()"""
        loss, _nni = 0.5, "taken"
        """@nni.report_intermediate_result(loss)"""
        if loss: """@nni.report_intermediate_result({
            'default': loss + 1})"""
        text = "@nni.report_final_result(1)"
        f"{loss} @nni.report_final_result(2)"
        ("@nni.report_final_result("
         "len(f'{loss}'))")
        """ @nni.report_final_result(3)"""
        ''',
        {},
        {"lr": 1},
        '''
        """@nni.get_next_parameter()"""
        loss, _nni = 0.5, "taken"
        """@nni.report_intermediate_result(loss)"""
        if loss: """@nni.report_intermediate_result({
            'default': loss + 1})"""
        text = "@nni.report_final_result(1)"
        f"{loss} @nni.report_final_result(2)"
        ("@nni.report_final_result("
         "len(f'{loss}'))")
        """ @nni.report_final_result(3)"""
        ''',
        then={
            "_nni": "taken",
            "reported": [("PERIODICAL", 0.5), ("PERIODICAL", {"default": 1.5}), ("FINAL", 3)],
        },
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_code_with_each_form_of_annotation_can_be_parsed_executed_and_filled_with_values(form, run):
    found = read(form.code)
    assert found.space == form.space
    names = run(generated(form.code), form.parameters)
    assert {name: names[name] for name in form.then} == form.then
    assert with_values(form.code.encode(), "train", form.parameters).decode() == form.filled_in


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_generated_code_keeps_every_line_number_and_unannotated_line(form):
    before, after = form.code.splitlines(), generated(form.code).splitlines()
    # A compound statement cannot follow an import in the same line, so the generated import has a line of its own.
    if before[0].startswith(("class", "def", "try")):
        assert after.pop(0) == "import nni_sdk.annotated as _nni"
    assert len(after) == len(before)
    others = form.filled_in.splitlines()
    for number, line in enumerate(before):
        follows = number > 0 and "@nni." in before[number - 1]
        if line == others[number] and not follows and not re.search("@nni.(report|get)", line):
            assert re.sub("(; )?import nni_sdk.annotated as _nni_?(; )?", "", after[number]) == line


@pytest.mark.parametrize("word", TYPES)
def test_annotations_support_every_search_space_type(word, run):
    code = f"'''@nni.variable(nni.{word}({', '.join(map(repr, TYPES[word]))}), name=x)'''\nx = 1\n"
    key = f"train/x/{word}"
    assert read(code).space == {key: {"_type": word, "_value": TYPES[word]}}
    assert run(generated(code), {key: 4})["x"] == 4
    assert with_values(code.encode(), "train", {key: 1e-05}).decode().endswith("\nx = 1e-05\n")


def test_generated_code_matches_the_golden_text():
    code = lines(
        '''
        #!/usr/bin/env python
        """Trains."""
        from __future__ import annotations  # for later

        """@nni.variable(nni.choice(16, width), name=size)"""
        size: int = 32  # of a batch
        """@nni.variable(nni.loguniform(1e-4, 0.1), name=lr)"""
        lr = (0.01)
        """@nni.report_final_result(lr)"""
        '''
    )
    assert generated(code) == lines(
        '''
        #!/usr/bin/env python
        """Trains."""
        from __future__ import annotations; import nni_sdk.annotated as _nni  # for later

        """@nni.variable(nni.choice(16, width), name=size)"""
        size: int = (16 if _nni.takes('train/size/choice', 16) else (width) if _nni.takes('train/size/choice', 'width') \\
        else _nni.no_option('train/size/choice'))  # of a batch
        """@nni.variable(nni.loguniform(1e-4, 0.1), name=lr)"""
        lr = (_nni.parameter('train/lr/loguniform'))
        _nni.report_final_result(lr)
        '''
    ).replace("\\\n", "")


@pytest.mark.parametrize(
    ("head", "begins"),
    [
        ("x = 1\n", "import nni_sdk.annotated as _nni; x = 1\n"),
        ("'''Doc.'''; x = 1\n", "'''Doc.'''; import nni_sdk.annotated as _nni; x = 1\n"),
        ("# note\n\n@print\ndef f(): pass\n", "# note\n\nimport nni_sdk.annotated as _nni\n@print\ndef f(): pass\n"),
        ("_nni = 1\n", "import nni_sdk.annotated as _nni_; _nni = 1\n"),
        ("", "import nni_sdk.annotated as _nni; _nni.report_final_result(0)"),
    ],
)  # fmt: skip
def test_the_generated_import_is_the_first_statement_and_its_name_is_not_used_elsewhere(head, begins, run):
    code = generated(head + "'''@nni.report_final_result(0)'''\n")
    assert code.startswith(begins)
    assert run(code, {})["reported"] == [("FINAL", 0)]


@pytest.mark.parametrize("option", ["1 if True else 2", "lambda: 5", "y or 3", "(y, 4)"])
def test_any_option_of_a_choice_can_be_chosen_if_the_first_option_is_a_complex_expression(option, run):
    found = read(f"y = 0\n'@nni.variable(nni.choice({option}, y + 7), name=x)'\nx = 1\n".encode())
    first = run(found.generated, {"train/x/choice": option})["x"]
    assert (first() if callable(first) else first) in (1, 5, 3, (0, 4))
    assert run(found.generated, {"train/x/choice": "y + 7"})["x"] == 7


# Python finds no encoding declaration in a file with these line ends.
ENDS = [("\r", "utf-8"), ("\r", "utf-8-sig")]


@pytest.mark.parametrize(
    ("newline", "encoding"),
    [*itertools.product(["\n", "\r\n"], ["utf-8", "utf-8-sig", "latin-1", "cp1251"]), *ENDS],
)
def test_generated_code_keeps_the_encoding_and_the_line_endings(encoding, newline, run):
    letter = {"latin-1": "é", "cp1251": "я"}.get(encoding, "€")
    declared = f"# -*- coding: {encoding.removesuffix('-sig')} -*-"
    text = [
        declared,
        f"'''@nni.variable(nni.choice('{letter}', '{letter}{letter}'), name=x)'''; x = '{letter}'; y = '{letter}'",
        "if 1:",
        f"\t'''@nni.report_final_result(len(x))'''  # {letter}",
        f"\tz = '{letter}'",
        "",
    ]
    source = newline.join(text).encode(encoding)
    found = read(source)
    assert found.diagnostics == ()
    assert found.space == {"train/x/choice": choice(letter, letter * 2)}
    code = found.generated.decode(encoding)
    assert code.split(newline)[2:] == [
        "if 1:",
        f"\t_nni.report_final_result(len(x))  # {letter}",
        f"\tz = '{letter}'",
        "",
    ]
    assert newline == "\n" or re.sub(newline, "", code).count("\n") == 0
    names = run(found.generated, {"train/x/choice": letter * 2})
    assert (names["x"], names["y"], names["z"]) == (letter * 2, letter, letter)
    assert names["reported"] == [("FINAL", 2)]


def test_the_generated_import_uses_the_line_ending_of_the_file():
    found = read(b"def f(): pass\r\n'@nni.report_final_result(1)'\r\n")
    assert found.generated == (
        b"import nni_sdk.annotated as _nni\r\ndef f(): pass\r\n_nni.report_final_result(1)\r\n"
    )


def test_a_module_name_is_escaped_if_the_encoding_of_the_file_cannot_represent_the_name(run):
    source = b"# coding: ascii\n'''@nni.variable(nni.choice(1, 2), name=x)'''\nx = 1\n"
    found = read(source, "пакет.данные")
    assert found.space == {"пакет.данные/x/choice": choice(1, 2)}
    assert run(found.generated, {"пакет.данные/x/choice": 2})["x"] == 2


# ---- invalid annotations

V = "'''@nni.variable(nni.choice(1, 2), name=x)'''"
F = "'''@nni.function_choice(f(1), g(2), name=f)'''"
WRONG = {
    "'''@nni.varable(nni.choice(1, 2), name=x)'''\nx = 1": "1: cannot use @nni.varable: there is no such annotation; did you "
    "mean variable? (known: variable, function_choice, get_next_parameter, report_intermediate_result, report_final_result)",
    "'''@nni.mutable_layers({})'''": "1: cannot use @nni.mutable_layers: architecture search is not supported; use @nni.func",
    "'''@nni.training_update(x)'''": "1: cannot use @nni.training_update: architecture search is not supported; ",
    "'''@nni.variable'''\nx = 1": "1: cannot use @nni.variable: an annotation must be a single call; write e.g. '''@nni",
    "'''@nni.get_next_parameter() + 1'''": "1: cannot use @nni.get_next_parameter: an annotation must be a single call; ",
    "x = 1\n'''@nni.report_final_result(\n x y)'''": "3: cannot use this annotation: it is not Python (",
    "f'@nni.report_final_result({1})'": "1: cannot use an f-string as an annotation; remove the f: names in an "
    "annotation need no",
    f"{V}\n{V}\nx = 1": "1: cannot use @nni.variable above another annotation: it has no target there; write it right above its",
    f"{F}\n'''@nni.get_next_parameter()'''\nf(1)": "1: cannot use @nni.function_choice above another annotation: it has no",
    f"x = 1\n{V}": "2: cannot use @nni.variable at the end of a block: it has no target there; write it right above its ",
    f"if 1:\n  {F}\nf(1)": "2: cannot use @nni.function_choice at the end of a block: it has no target there; ",
    f"{V}\ny = 1": "1: cannot use @nni.variable with name=x: line 2 assigns y; write name=y, or move the annotation "
    "right above the "
    "assignment of x",
    f"{V}\nx += 1": "1: cannot use @nni.variable: line 2, the next statement, does not assign a value; write `x = ...` there",
    f"{V}\nx: int": "1: cannot use @nni.variable: line 2, the next statement, does not assign a value; ",
    f"{V}\n\nprint(1)": "1: cannot use @nni.variable: line 3, the next statement, does not assign a value; ",
    f"{V}\nx = y = 1": "1: cannot use @nni.variable: line 2 assigns x and y at once; write a separate assignment for each",
    f"{V}\nx, y = 1, 2": "1: cannot use @nni.variable with name=x: line 2 assigns (x, y); ",
    V.replace("=x", "='x'") + "\nx = 1": "1: cannot use @nni.variable with name='x': it is not the name of a variable; write the "
    "name as in the code, without quotes",
    F.replace("=f", "=f(1)") + "\nf(1)": "1: cannot use @nni.function_choice with name=f(1): it is not the name of a function; ",
    V.replace("name", "nam") + "\nx = 1": "1: cannot use @nni.variable with nam: it takes only options and a name; write e.g. ",
    V.replace("name=x", "**x") + "\nx = 1": "1: cannot use @nni.variable with **: it takes only options and a name; ",
    "'''@nni.variable(name=x)'''\nx = 1": "1: cannot use @nni.variable without options; write e.g. ",
    V.replace("nni.choice(1, 2)", "nni.choice(1), 2") + "\nx = 1": "1: cannot use @nni.variable with several sets of values; ",
    V.replace("nni.choice(1, 2)", "[1, 2]") + "\nx = 1": "1: cannot use @nni.variable for line 2: [1, 2] is not a set "
    "of values; ",
    V.replace("nni.choice", "choice") + "\nx = 1": "1: cannot use @nni.variable for line 2: choice(1, 2) is not a set of values; "
    "did you mean nni.choice? ",
    V.replace("choice", "choise") + "\nx = 1": "1: cannot use @nni.variable for line 2: nni.choise(1, 2) is not a set of values; "
    "did you mean nni.choice? (known: nni.choice, nni.randint, ",
    V.replace("(1, 2)", "(*a)") + "\nx = 1": "1: cannot use nni.choice(*a): it takes values without names and *; ",
    V.replace("(1, 2)", "()") + "\nx = 1": "1: cannot use train/x/choice: the choice has no option; list at least one",
    V.replace("(1, 2)", "('a', a)") + "\nx = 1": "1: cannot use train/x/choice: the search space cannot distinguish the text 'a' "
    "from the expression a; write one of them differently",
    V.replace("choice(1, 2)", "uniform(a, 2)") + "\nx = 1": "1: cannot use nni.uniform: a is not a number; write numbers such as",
    V.replace("choice(1, 2)", "randint(True, 2)") + "\nx = 1": "1: cannot use nni.randint: True is not a number; ",
    V.replace("choice(1, 2)", "uniform(2, 1)") + "\nx = 1": "1: cannot use train/x/uniform: low 2 is not below high 1; swap them",
    V.replace("choice(1, 2)", "loguniform(0, 1)") + "\nx = 1": "1: cannot use train/x/loguniform: low 0 is not above 0; ",
    V.replace("choice(1, 2)", "uniform(0, 1e999)") + "\nx = 1": "1: cannot use nni.uniform: 1e309 is not a number; ",
    V.replace("choice(1, 2)", "quniform(0, 1)") + "\nx = 1": "1: cannot use train/x/quniform: [0, 1] has 2 items; quniform requ",
    f"{V}\nx = 1\n{V.replace('2', '3')}\nx = 1": "3: cannot use train/x/choice: another annotation gives x other values; give "
    "both the same values, or rename one of them",
    f"{F}\ng(3)": "1: cannot use @nni.function_choice: line 2, the next statement, does not call f; write the annotati",
    "'''@nni.function_choice(f(1), g(2))'''\nf(3)": "1: cannot use @nni.function_choice: line 2, the next statement, "
    "calls none of its options; ",
    f"{F}\nprint(f'{{f(1)}}')": "1: cannot use @nni.function_choice for a call in an f-string, in line 2; assign the "
    "result of the call to a",
    "'''@nni.function_choice(*a, name=f)'''\nf()": "1: cannot use @nni.function_choice with a * argument: options "
    "must be listed one by one; ",
    "'''@nni.get_next_parameter(1)'''": "1: cannot use @nni.get_next_parameter: it takes no arguments; write e.g. "
    "'''@nni.get_next",
    "'''@nni.report_final_result()'''": "1: cannot use @nni.report_final_result: it takes exactly one value and no "
    "name; write e.g. ",
    "'''@nni.report_final_result(x, name=y)'''": "1: cannot use @nni.report_final_result: it takes exactly one value "
    "and no name; ",
    "'''@nni.report_final_result(1)'''\nfrom __future__ import annotations": "1: cannot use an annotation above `from __future__",
    "x = (1\n'@nni.'": "1: cannot use this file: it is not Python ('(' was never closed); fix the file, or list it in .nniignore",
    "print 'x'\n'''@nni.get_next_parameter()'''": "1: cannot use this file: it is not Python (Missing parentheses in call to ",
    "'@nni.'\0": "1: cannot use this file: it is not Python (source code string cannot contain null bytes); ",
    b"x = 1\r\n'@nni.\xff'": "2: cannot use this file: byte 13 is not utf-8; save the file in its declared encoding, or as UTF-8",
    b"# coding: rot13\n'@nni.'": "1: cannot use this file: rot13 is not an encoding of Python code; save the file as "
    "UTF-8, and decl",
    b"# coding: undefined\n'@nni.'": "1: cannot use this file: undefined is not an encoding of Python code; ",
    b"# coding: utf-9\n'@nni.'": "1: cannot use this file: unknown encoding: utf-9; save it as UTF-8, or declare its encoding in",
    "# coding: ascii\n'''@nni.report_final_result(u'\\u20ac')'''\n": "1: cannot use this file: ascii cannot encode "
    "'€'; save it as U",
}  # fmt: skip


@pytest.mark.parametrize(("code", "expected"), WRONG.items(), ids=range(len(WRONG)))
def test_an_invalid_annotation_is_reported_with_its_line_and_a_remedy(code, expected):
    (line,) = diagnostics(code)
    assert line.startswith(f"train.py:{expected}")
    assert "; " in line


def test_all_annotation_errors_of_a_file_are_reported_together():
    code = f"{V}\ny = 1\ndef f():\n    '''@nni.foo()'''\n    {V}\n'''@nni.report_final_result()'''\n"
    assert [line.split(": cannot use ")[0] for line in diagnostics(code)] == [
        f"train.py:{number}" for number in (1, 4, 5, 6)
    ]


def test_too_deeply_nested_code_is_reported_as_one_error():
    code = "if 0: pass\n" + "elif 0: pass\n" * 3000 + "'''@nni.get_next_parameter()'''\n"
    found = read(code)
    assert found.generated is not None or len(found.diagnostics) == 1
    (line,) = diagnostics("x = " + "(" * 5000 + ")" * 5000 + "\n'@nni.'")
    assert line.startswith("train.py:1: cannot use this file: ")


def test_reading_code_prints_no_compiler_warnings():
    assert generated("x = '\\d'\n'''@nni.report_final_result(x is 1)'''\n")


# ---- missing values


def test_trial_code_raises_if_the_parameters_lack_the_value_of_an_annotation(run):
    code = generated(f"{V}\nx = 1\n")
    expected = r"cannot find a value of 'train/x/choice' for trial tRiAl: its parameters are \{'y': 1\}; "
    with pytest.raises(ParameterAbsent, match=expected):
        run(code, {"y": 1})


def test_trial_code_raises_if_a_value_is_outside_the_options_of_its_annotation(run):
    code = generated("'''@nni.variable(nni.choice(1, abs(2)), name=x)'''\nx = 1\n")
    with pytest.raises(
        ParameterAbsent, match="cannot use True as the value of 'train/x/choice': the annotation has no such"
    ):
        run(code, {"train/x/choice": True})


def test_trial_code_may_request_parameters_before_an_annotation_uses_a_value(run):
    code = generated(f"'''@nni.get_next_parameter()'''\n{V}\nx = 1\n")
    assert run(code, {"train/x/choice": 2})["x"] == 2


def test_filling_in_values_raises_if_a_value_is_missing_or_outside_the_options():
    code = b"'''@nni.variable(nni.choice(1, abs(2)), name=x)'''\nx = 1\n"
    with pytest.raises(
        ValueMissing, match="cannot fill in train/x/choice: the trial has no value for this key; "
    ):
        with_values(code, "train", {})
    with pytest.raises(ValueMissing, match="cannot fill in train/x/choice: 5 is not one of its options; "):
        with_values(code, "train", {"train/x/choice": 5})
    # All options of V are literals, so with_values() also accepts a value that is not one of the options.
    assert with_values(f"{V}\nx = 1".encode(), "train", {"train/x/choice": "é"}).endswith(b"x = '\\xe9'")


# ---- arbitrary code

SNIPPETS = st.sampled_from(
    [
        "x = 1",
        "def f(a, *b):\n    '''doc'''\n    return a",
        "# @nni.variable",
        "\t",
        "'@nni'",
        "é = '\\d'",
        "print 'two'",
    ]
)
SOURCES = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(SNIPPETS, max_size=8).flatmap(
        lambda parts: st.sampled_from(["\n", "\r\n", "\r"]).map(lambda end: end.join(parts).encode())
    ),
)


@given(SOURCES)
def test_a_file_without_annotations_is_unchanged(source):
    found = read(source)
    assert (found.space, found.generated) == ({}, None)
    if b"@nni." not in source:  # If a comment or a string contains @nni., read() may report errors.
        assert found.diagnostics == ()
        assert with_values(source, "train", {}) == source


ANY_TEXT = st.text("nai.@()'\"\\,= \n\tf1*é", max_size=40)


@given(st.sampled_from(["", "variable(", "function_choice(", "report_final_result("]), ANY_TEXT, ANY_TEXT)
def test_any_annotation_text_gives_code_or_an_error_with_a_line_number(kind, text, after):
    source = f"'''@nni.{kind}{text}'''\n{after}\n".encode()
    found = read(source)
    if found.generated is not None:
        compile(found.generated.decode(), "train.py", "exec", dont_inherit=True)
        assert found.diagnostics == ()
    for error in found.diagnostics:
        assert re.fullmatch(r"cannot .*; .+", error.message, re.DOTALL)
        assert 1 <= error.line <= source.count(b"\n") + 1


@given(st.randoms(use_true_random=False), st.sampled_from(["\n", "\r\n"]))
def test_each_annotation_of_a_file_receives_its_own_value(randomness: random.Random, newline):
    code, parameters, indent = ["import sys"], {}, ""
    for number in range(randomness.randint(1, 8)):
        if randomness.random() < 0.3:
            code.append(f"{indent}if True:  # é")
            indent += randomness.choice(["\t", "  "])
        value, own = randomness.randint(0, 9), randomness.choice(["0", "(\n1 +\n2)", "[ 'é' ]"])
        code += [
            f"{indent}'''@nni.variable(nni.randint(0, 10), name=v{number})'''",
            f"{indent}v{number} = {own}  # é",
        ]
        parameters[f"train/v{number}/randint"] = value
    source = newline.join("\n".join(code).split("\n")).encode()
    filled_in: dict[str, object] = {}
    exec(compile(with_values(source, "train", parameters), "train.py", "exec"), filled_in)
    assert {f"train/{name}/randint": filled_in[name] for name in filled_in if name[0] == "v"} == parameters
    found = read(source)
    assert found.generated.count(newline.encode()) == source.count(newline.encode())
    assert found.space.keys() == parameters.keys()


def test_the_original_annotated_code_also_runs_without_nni(capsys):
    for form in FORMS.values():
        exec(compile(form.code, "train.py", "exec", dont_inherit=True), {"__name__": "train"})
    assert capsys.readouterr().out == ""
