import pickle
import re
import sys

import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.process.ending import Stopped
from digen_jax.shapes.reward import shapes_geneval

IMAGES = np.zeros((3, 8, 8, 3), np.float32)
PROMPTS = ["one", "two", "three"]
METADATA = [{"prompt": prompt} for prompt in PROMPTS]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory, with Python's module tables restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def call(scores):
    return rewards.call(lambda *_: scores, ("mine:f",), IMAGES, PROMPTS, METADATA)


def test_the_built_in_reward_has_a_name():
    assert rewards.resolve(("shapes_geneval",)) is shapes_geneval


def test_a_users_own_function_is_found_in_the_current_directory(folder):
    (folder / "my_reward.py").write_text("def redness(images, prompts, metadata):\n    return 7\n")
    assert rewards.resolve(("my_reward:redness",))(IMAGES, PROMPTS, METADATA) == 7


def test_several_names_are_one_function_with_a_column_each(folder):
    (folder / "two_rewards.py").write_text(
        "def red(images, *_):\n    return images[:, 0, 0, 0]\n"
        "def blue(images, *_):\n    return images[:, 0, 0, 2].tolist()\n"
    )
    names = ("two_rewards:red", "two_rewards:blue")
    both = rewards.resolve(names)
    assert both.names == names
    images = np.arange(3 * 8 * 8 * 3, dtype=np.float32).reshape(3, 8, 8, 3) / 576
    scores = rewards.call(both, names, images, PROMPTS, METADATA)
    np.testing.assert_array_equal(scores, images[:, 0, 0, ::2])
    total = rewards.total(scores, (2.0, -1.0))
    assert total.dtype == np.float32
    np.testing.assert_allclose(total, 2 * images[:, 0, 0, 0] - images[:, 0, 0, 2], rtol=1e-6)
    each = rewards.each(names, scores)
    assert list(each) == ["two_rewards:red", "two_rewards:blue"]
    np.testing.assert_array_equal(each["two_rewards:blue"], scores[:, 1])
    assert rewards.each(("two_rewards:red",), total) == {}


def test_of_one_reward_the_total_is_itself():
    scores = np.float32([0.1, 1e-30, 3e38])
    np.testing.assert_array_equal(rewards.total(scores, (1.0,)), scores)
    np.testing.assert_array_equal(rewards.total(scores[:, None], (1.0,)), scores)


def test_a_reward_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="'shapes_geneval' is named twice"):
        rewards.resolve(("shapes_geneval", "shapes_geneval"))


@pytest.mark.parametrize("name", ["shape_geneval", "module:", ":function", ""])
def test_an_unknown_name_is_refused(name):
    expected = f"unknown reward '{name}': use one of shapes_geneval, or module:function"
    with pytest.raises(ValueError, match=re.escape(expected)):
        rewards.resolve((name,))


@pytest.mark.parametrize("name", ["no_such_module:f", "no_such.module:f", "json.nothing:f"])
def test_a_missing_module_is_named(folder, name):
    with pytest.raises(ValueError, match=f"there is no module '{name.split(':')[0]}' in"):
        rewards.resolve((name,))


def test_a_missing_function_is_named(folder):
    (folder / "other_reward.py").write_text("number = 3\n")
    with pytest.raises(ConfigError, match="module other_reward has no function 'redness'"):
        rewards.resolve(("other_reward:redness",))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("f = 3", r"is a int: name a function$"),
        (
            "class f:\n    pass",
            r"is a class: name a function, or an instance of it that the module makes$",
        ),
        (
            "def f(images):\n    pass",
            r"takes \(images\): it must take \(images, prompts, metadata\)$",
        ),
        ("def f(a, b, c, d):\n    pass", r"takes \(a, b, c, d\): it must take"),
        ("def f(:\n", r"cannot be imported: SyntaxError: .*\n  .*mistaken.py, line 1: def f\(:$"),
        (
            "\nimport no_such",
            r"ModuleNotFoundError: .*'no_such'\n  .*mistaken.py, line 2, in <module>: im",
        ),
        (
            "import sys\nsys.exit(3)",
            r"cannot be imported: SystemExit: 3\n  .*mistaken.py, line 2, in",
        ),
        (
            "import json\njson.loads('{')",
            r"JSONDecodeError: .*\n  .*mistaken.py, line 2, in <module>: j.*$",
        ),
    ],
)
def test_what_cannot_be_a_reward_is_refused_when_it_is_named(folder, code, sentence):
    (folder / "mistaken.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"(?s)^reward 'mistaken:f' .*{sentence}"):
        rewards.resolve(("mistaken:f",))


@pytest.mark.parametrize(
    "form", ["lambda *_: 1", "lambda i, p, m, k=2: 1", "(lambda i, prompts, metadata: 1)"]
)
def test_arguments_may_have_any_names(folder, form):
    (folder / "lenient.py").write_text(f"f = {form}\n")
    assert rewards.resolve(("lenient:f",))(IMAGES, PROMPTS, METADATA) == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("return images[:, 9]", "IndexError: index 9 is out of bounds for axis 1 with size 8"),
        ("return np.stack([])", "ValueError: need at least one array to stack"),
        (
            "sys.exit(3)",
            "SystemExit: 3",
        ),  # of a code, as wandb puts its own exit in place, whose default is 0
        ("assert False", "AssertionError"),
    ],
)
def test_what_a_reward_raises_is_said_with_the_users_own_lines(folder, line, error):
    inner = f"import sys\nimport numpy as np\ndef inner(images):\n    {line}\n"
    (folder / "raising.py").write_text(f"{inner}def f(images, *_):\n    return inner(images)\n")
    with pytest.raises(ConfigError) as caught:
        rewards.call(rewards.resolve(("raising:f",)), ("raising:f",), IMAGES, PROMPTS, METADATA)
    file = folder / "raising.py"
    assert str(caught.value).splitlines() == [
        f"reward 'raising:f' raised {error}",
        f"  {file}, line 6, in f: return inner(images)",
        f"  {file}, line 4, in inner: {line}",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("scores", [[0, 1, 1], [True, False, True], np.float64([0.5, -2, 1e9])])
def test_scores_become_float32(scores):
    checked = call(scores)
    assert checked.dtype == np.float32
    np.testing.assert_array_equal(checked, np.float32(scores))


@pytest.mark.parametrize(
    ("scores", "shape"), [(0.5, "()"), ([1.0, 2.0], "(2,)"), (np.zeros((3, 1)), "(3, 1)")]
)
def test_a_wrong_shape_is_refused(scores, shape):
    expected = f"reward 'mine:f' returned shape {shape} for 3 images"
    with pytest.raises(ValueError, match=re.escape(expected)):
        call(scores)


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (-np.inf, "-inf"), (1e60, "inf")])
def test_a_value_that_is_not_finite_is_refused(value, shown):
    with pytest.raises(ValueError, match=rf"'mine:f' returned {shown} for image 1 \('two'\)"):
        call([0.0, value, 1.0])


@pytest.mark.parametrize("scores", [["a", "b", "c"], [1j, 2, 3], [None, 1, 2], [{}, {}, {}]])
def test_scores_that_are_no_numbers_are_refused(scores):
    with pytest.raises(ConfigError, match=r"'mine:f' returned .* values: return numbers"):
        call(scores)


def test_nothing_returned_is_refused():
    with pytest.raises(ConfigError, match="'mine:f' returned None: return one number an image"):
        call(None)


def test_that_a_pool_cannot_go_on_is_not_the_rewards_exception():
    def pooled(images, prompts, metadata):
        raise Stopped("reward 'mine:f' took more than 3 seconds")

    with pytest.raises(Stopped, match=r"^reward 'mine:f' took more than 3 seconds$"):
        rewards.call(pooled, ("mine:f",), IMAGES, PROMPTS, METADATA)
