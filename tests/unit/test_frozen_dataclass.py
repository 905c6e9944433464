import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nni_manager
import trial_keeper
from trial_keeper.frozen_dataclass import dataclass

BODIES = {
    "two fields": {"a": int, "b": str},
    "no field": {},
    "one field": {"a": float},
    "defaults": {"a": int, "b": (int, 3), "c": (list, dataclasses.field(default_factory=list))},
    "a field that is not shown": {"a": int, "b": (str, dataclasses.field(default="", repr=False))},
    "a field that is not compared": {"a": int, "b": (str, dataclasses.field(default="x", compare=False))},
    "a field that is not hashed": {"a": int, "b": (str, dataclasses.field(default="x", hash=False))},
    "methods": {
        "a": int,
        "__post_init__": lambda self: object.__setattr__(self, "a", self.a + 1),
        "doubled": property(lambda self: 2 * self.a),
    },
    "an equality of its own": {"a": int, "b": (str, ""), "__eq__": lambda self, other: self.a == other.a},
    "a hash of its own": {"a": int, "__hash__": lambda self: 7},
    "a text of its own": {"a": int, "__repr__": lambda self: f"<{self.a}>"},
}
# NaN is excluded: since Python 3.13, the standard library compares field by field, so an object with NaN is not equal to itself.
VALUES = st.integers(0, 2) | st.floats(allow_nan=False) | st.sampled_from(["", "x"]) | st.none()


def made(body, decorate, name="Example", base=()):
    """A class with these fields and methods, decorated."""
    fields = {
        key: each if isinstance(each, tuple) else (each,) for key, each in body.items() if is_field(each)
    }
    others = {key: each for key, each in body.items() if not is_field(each)}
    defaults = {key: each[1] for key, each in fields.items() if len(each) > 1}
    annotations = {key: each[0] for key, each in fields.items()}
    namespace = {"__annotations__": annotations, "__doc__": "An example.", "__module__": __name__}
    return decorate(frozen=True, slots=True)(type(name, base, namespace | defaults | others))


def is_field(each):
    return isinstance(each, type | tuple)


def outcome(call):
    """What a call returns, or its error without the memory addresses that it may name."""
    try:
        return call()
    except (TypeError, AttributeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@given(data=st.data())
def test_a_frozen_dataclass_behaves_like_a_frozen_dataclass_of_the_standard_library(body, data):
    values = data.draw(st.lists(st.lists(VALUES, max_size=3), min_size=2, max_size=2))

    def seen(cls):
        found = [
            inspect.signature(cls),
            cls.__match_args__,
            cls.__doc__,
            [each.name for each in dataclasses.fields(cls)],
        ]
        objects = [outcome(lambda each=each: cls(*each)) for each in values]
        found += [each if isinstance(each, tuple) else repr(each) for each in objects]
        one, other = objects
        if isinstance(one, cls):
            found += [
                dataclasses.asdict(one),
                outcome(lambda: hash(one)),
                one == copy.deepcopy(one),
            ]
            found += [
                repr(copy.copy(one)),
                hasattr(one, "__dict__"),
                repr(outcome(lambda: dataclasses.replace(one, a=2))),
            ]
        if isinstance(one, cls) and cls.__match_args__:
            found += [outcome(lambda: setattr(one, "a", 1)), outcome(lambda: delattr(one, "a"))]
        if isinstance(one, cls) and isinstance(other, cls):
            found += [one == other, one != other]
        return repr(found)

    assert seen(made(body, dataclass)) == seen(made(body, dataclasses.dataclass))


@dataclass(frozen=True, slots=True)
class Stored:
    """A class that pickle can import."""

    a: int
    b: list[int] = dataclasses.field(default_factory=list)


def test_an_object_survives_pickling_and_its_deep_copy_has_its_own_list():
    one = Stored(1, [2])
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - the test's own bytes
    deep = copy.deepcopy(one)
    deep.b.append(3)
    assert (one.b, deep.b) == ([2], [2, 3])
    assert Stored(1).b is not Stored(1).b


def test_no_attribute_can_be_added_to_an_object():
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'z'"):
        made({"a": int}, dataclass)(1).z = 2


def test_objects_of_two_classes_are_not_equal_even_if_their_fields_are_equal():
    ours, others = made({"a": int}, dataclass), made({"a": int}, dataclass, "Other")
    assert ours(1) != others(1)
    assert len({ours(1), others(1), ours(1)}) == 2


@pytest.mark.parametrize(
    "decorate", [dataclass, dataclasses.dataclass], ids=["here", "by the standard library"]
)
def test_a_frozen_dataclass_can_be_the_base_class_of_another_dataclass(decorate):
    base = made({"a": int}, dataclass)
    derived = made({"b": (int, 2)}, decorate, "Derived", (base,))
    assert derived(1) == derived(1, 2) != base(1)
    assert repr(derived(1)) == "Derived(a=1, b=2)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        derived(1).a = 2


def test_the_decorator_without_options_creates_a_mutable_dataclass():
    @dataclass
    class Plain:
        """Can be changed."""

        a: int

    changed = Plain(1)
    changed.a = 2
    assert changed == Plain(2)


@pytest.mark.parametrize("unsupported", [{"init": False, "default": 1}, {"kw_only": True}])
def test_a_class_with_an_unsupported_field_is_refused(unsupported):
    with pytest.raises(AssertionError, match="cannot make Example"):
        made({"a": (int, dataclasses.field(**unsupported))}, dataclass)


def test_no_module_of_a_keeper_or_manager_uses_the_slower_decorator_of_the_standard_library():
    slow = re.compile(
        r"^from dataclasses import .*\bdataclass\b[\s\S]*^@dataclass\(frozen=True, slots=True\)", re.MULTILINE
    )
    folders = [Path(package.__file__).parent for package in (trial_keeper, nni_manager)]
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    assert [str(path) for path in modules if slow.search(path.read_text())] == []
    assert slow.search(
        "from dataclasses import dataclass, field\n\n\n@dataclass(frozen=True, slots=True)\nclass A: ...\n"
    )
