import pickle
import re
import sys

import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import BUILT_IN, find_sanity_check, resolve
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.sanity_check import run_sanity_checks
from tests.parallel import toy

IMAGES = np.zeros((3, 8, 8, 3), np.uint8)
PROMPTS = ["one", "two", "three"]
METADATA = [{"prompt": prompt} for prompt in PROMPTS]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory, with Python's module tables restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def asked(*names):
    """The rewards of sections, or of names."""
    return resolve(
        [one if isinstance(one, RewardSettings) else RewardSettings(one) for one in names]
    )


def function(name, **settings):
    (found,) = asked(RewardSettings(name, settings=settings)).members
    return found.function


def answer(scores, weight=1.0, name="mine:f"):
    settings = RewardSettings(name, weight)
    return rewards.NamedReward(settings, lambda *_: scores).answer((IMAGES, PROMPTS, METADATA))


def call(scores):
    found = answer(scores)
    assert not found.shown
    return found.columns[:, 0]


def test_several_names_are_one_function_with_a_column_each(folder):
    (folder / "two_rewards.py").write_text(
        "def red(images, *_):\n    return images[:, 0, 0, 0]\n"
        "def blue(images, *_):\n    return images[:, 0, 0, 2].tolist()\n"
    )
    names = ("two_rewards:red", "two_rewards:blue")
    both = asked(names[0], RewardSettings(names[1], weight=-2.0))
    assert (both.names, both.weights, both.label) == (names, (1.0, -2.0), ", ".join(names))
    images = np.arange(3 * 8 * 8 * 3).reshape(3, 8, 8, 3).astype(np.uint8)
    scores = both.score(images, PROMPTS, METADATA)
    np.testing.assert_array_equal(scores.columns, images[:, 0, 0, ::2])
    assert scores.columns.dtype == np.float32 and scores.shown == {}
    total = rewards.total(scores.columns, both.weights)
    assert total.dtype == np.float32
    red, blue = images[:, 0, 0, ::2].astype(np.float64).T
    np.testing.assert_allclose(total, red - 2 * blue, rtol=1e-6)
    each = rewards.each(names, scores)
    assert list(each) == list(names)
    np.testing.assert_array_equal(each["two_rewards:blue"], blue)
    alone = rewards.Scores(scores.columns[:, :1], {})
    assert rewards.each(names[:1], alone) == {}
    column = np.float32([0.1, 1e-30, 3e38])
    np.testing.assert_array_equal(rewards.total(column[:, None], (1.0,)), column)


def test_records_name_the_rewards_that_apply(folder):
    (folder / "naming.py").write_text(
        "seen = []\n"
        "def red(images, prompts, metadata):\n    seen.append(prompts)\n    return images[:, 0, 0, 0]\n"
        "def parts(images, prompts, metadata):\n    seen.append(prompts)\n"
        "    return {'parts': images[:, 0, 0, 1], 'more': images[:, 0, 0, 2]}\n"
        "def never(images, prompts, metadata):\n    raise AssertionError\n"
    )
    found = asked("naming:red", "naming:parts", "naming:never")
    named = [["naming:red"], ["naming:parts"], ["naming:parts", "naming:red"]]
    metadata = [{"prompt": "", "rewards": names} for names in named]
    images = np.arange(3 * 8 * 8 * 3).reshape(3, 8, 8, 3).astype(np.uint8)
    scores = found.score(images, PROMPTS, metadata)
    red, green, blue = images[:, 0, 0].astype(np.float32).T
    nan = np.nan
    expected = [[red[0], nan, nan], [nan, green[1], nan], [red[2], green[2], nan]]
    np.testing.assert_array_equal(scores.columns, np.float32(expected))
    assert list(scores.shown) == ["naming:parts/more"]
    np.testing.assert_array_equal(scores.shown["naming:parts/more"], [nan, blue[1], blue[2]])
    assert sys.modules["naming"].seen == [["one", "three"], ["two", "three"]]
    total = rewards.total(scores.columns, (2.0, 0.5, 7.0))
    np.testing.assert_array_equal(total, [2 * red[0], green[1] / 2, 2 * red[2] + green[2] / 2])
    assert rewards.applicable(scores.columns[:, 0]).tolist() == [red[0], red[2]]
    twice = rewards.joined([scores, found.score(images, PROMPTS, metadata[:1] * 3)])
    assert twice.columns.shape == (6, 3)
    np.testing.assert_array_equal(twice.shown["naming:parts/more"][3:], [nan] * 3)


def test_a_groupwise_reward_gets_the_images_of_one_group_at_a_time(folder):
    (folder / "ranks.py").write_text(
        "calls = []\n"
        "def rank(images, prompts, metadata, sign=1):\n"
        "    assert all(record == metadata[0] for record in metadata)\n"
        "    values = [sign * int(image[0, 0, 0]) for image in images]\n"
        "    calls.append(values)\n"
        "    place = [sum(other < value for other in values) for value in values]\n"
        "    extra = {'size': [len(values)] * len(values)} if len(values) > 1 else {}\n"
        "    return {'rank': place} | extra\n"
        "rank.groupwise = True\n"
        "def plain(images, prompts, metadata):\n    return [len(images)] * len(images)\n"
    )
    sections = RewardSettings("ranks:rank", settings=dict(sign=-1)), RewardSettings("ranks:plain")
    found = resolve(sections)
    groups = [0, 0, 0, 1, 1, 2, 3]  # the third one has only the other reward
    metadata = [{"prompt": "same", "serial": group} for group in groups]
    metadata[5]["rewards"] = ["ranks:plain"]
    images = np.zeros((7, 4, 4, 3), np.uint8)
    images[:, 0, 0, 0] = [5, 9, 1, 7, 8, 2, 3]
    nan = np.nan
    pool = RewardPool(found, 0)
    for score in (found.score, pool.score):
        scores = score(images, ["same"] * 7, metadata)
        np.testing.assert_array_equal(scores.columns[:, 0], [1, 0, 2, 1, 0, nan, 0])
        np.testing.assert_array_equal(scores.columns[:, 1], 7)
        np.testing.assert_array_equal(scores.shown["ranks:rank/size"], [3, 3, 3, 2, 2, nan, nan])
        calls = sys.modules["ranks"].calls
        assert calls == [[-5, -9, -1], [-7, -8], [-3]]
        calls.clear()
    pool.close()


def test_in_a_run_groups_arrive_complete_from_every_worker():
    seen, groups, images = [], 4, 3

    def brightest(images, prompts, metadata):
        serials = {record.get("serial") for record in metadata}
        assert len(serials) == 1
        seen.append((serials.pop(), len(images)))
        return toy.brightest(images, prompts, metadata)

    brightest.groupwise = True
    cut = dict(sampler__chunk=6, trainer__micro_batch=6, evaluation__batch=6)
    cut |= dict(batch__groups=groups, batch__images=images)
    c = toy.config(**toy.meshes((1, 1), (1, 1), workers=2), **cut)
    _, history, _ = toy.drive(toy.system(c, 3), c, 2, brightest)
    assert sorted(seen) == [(10 + group, images) for group in range(2 * groups)]
    for line in history:
        assert line["reward"] == pytest.approx(1 / images)


def test_the_score_with_the_rewards_name_is_trained():
    scores = {"other": [1, 2, 3], "f": [4, 5, 6]}
    found = answer(scores)
    assert found.columns.tolist() == [[4], [5], [6]]
    assert {name: one.tolist() for name, one in found.shown.items()} == {"mine:f/other": [1, 2, 3]}
    found = answer(scores, {"other": 0.5})
    assert found.columns.tolist() == [[1], [2], [3]] and list(found.shown) == ["mine:f/f"]
    found = answer(scores, {"other": 0.5, "f": 1.0})
    assert found.columns.tolist() == [[1, 4], [2, 5], [3, 6]] and not found.shown
    settings = RewardSettings("mine:f", {"other": 0.5, "f": 1.0}, clip=3.0)
    both = rewards.Rewards((rewards.NamedReward(settings, len),))
    assert (both.names, both.weights) == (("mine:f/other", "mine:f/f"), (0.5, 1.0))
    assert settings.clips == (3.0, 3.0)


@pytest.mark.parametrize(
    ("scores", "weight", "message"),
    [
        ({"a": [1, 2, 3], "b": [1, 2, 3]}, 1.0, "'a', 'b', but 'f'"),
        ({"f": [1, 2, 3]}, {"g": 1.0}, "'f', but 'g'"),
        ([1, 2, 3], {"g": 1.0}, "no dict.* 'g'"),
        ({"f": [1, 2, 3], "a": [1, 2]}, 1.0, r"'mine:f/a' returned shape \(2,\) for 3 images"),
        ({"f": [1, 2, 3], "a": [1, np.nan, 2]}, 1.0, "'mine:f/a' returned nan for image 1"),
    ],
)
def test_scores_that_do_not_match_the_weights_are_refused(scores, weight, message):
    with pytest.raises(ConfigError, match=message):
        answer(scores, weight)


def test_settings_are_keywords_of_the_function(folder):
    (folder / "set.py").write_text(
        "def f(images, prompts, metadata, *, scale=1.0, power):\n    return scale**power\n"
    )
    assert function("set:f", scale=3, power=2)(IMAGES, PROMPTS, METADATA) == 9
    for settings, message in (
        (dict(scale="3", power=2), "'scale' of reward 'set:f' is '3'"),
        (dict(scale=True, power=2), "'scale' of reward 'set:f' is True"),
        (dict(scael=3.0, power=2), "'scael'; did you mean 'scale'"),
        (dict(scale=3.0), "scale=1.0, power"),
    ):
        with pytest.raises(ConfigError, match=message):
            function("set:f", **settings)


def test_sections_with_one_reward_need_labels():
    with pytest.raises(ConfigError, match=r"config.rewards\[1\]: .*'shapes_geneval'"):
        asked("shapes_geneval", "shapes_geneval")
    with pytest.raises(ConfigError, match="'small'"):
        asked(
            RewardSettings("jpeg_compressibility", label="small"),
            RewardSettings("jpeg_incompressibility", label="small"),
        )
    with pytest.raises(ConfigError, match=r"config.rewards\[0\]: label = 'a/b'"):
        asked(RewardSettings("jpeg_compressibility", label="a/b"))
    with pytest.raises(ConfigError, match=r"^reward .*weights$"):  # a server's have no labels
        resolve([RewardSettings("shapes_geneval")] * 2, field="", serving=True)
    both = asked("jpeg_compressibility", RewardSettings("jpeg_compressibility", -1.0, label="size"))
    assert both.names == ("jpeg_compressibility", "size")
    assert both.label == "jpeg_compressibility, size"
    metadata = [{"rewards": [name]} for name in ("size", "jpeg_compressibility")] + [{}]
    columns = both.score(IMAGES, PROMPTS, metadata).columns
    assert (~np.isnan(columns)).tolist() == [[False, True], [True, False], [True, True]]
    assert find_sanity_check(both.members[1]) is find_sanity_check(both.members[0]) is not None
    run_sanity_checks(both, both.score)


def test_a_label_is_the_name_of_every_score():
    scores = {"other": [1, 2, 3], "f": [4, 5, 6]}
    for weight, shown in ((1.0, ["taste/other"]), ({"other": 0.5}, ["taste/f"])):
        settings = RewardSettings("mine:f", weight, label="taste")
        found = rewards.NamedReward(settings, lambda *_: scores)
        assert list(found.answer((IMAGES, PROMPTS, METADATA)).shown) == shown
    assert list(settings.entries.values()) == ["taste/other"]
    broken = rewards.NamedReward(RewardSettings("mine:f", label="taste"), lambda *_: None)
    with pytest.raises(ConfigError, match="reward 'taste' returned None"):
        broken.answer((IMAGES, PROMPTS, METADATA))


UNKNOWN = f"use one of {', '.join(sorted(BUILT_IN))}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"'{name}': {UNKNOWN}") for name in ("shape_geneval", "module:", ":function", "")),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("no_such.module:f", "no module 'no_such.module'"),
        ("json.nothing:f", "no module 'json.nothing'"),
        ("json:redness", "json .*'redness'"),
    ],
)
def test_an_unknown_name_module_or_function_is_named(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        asked(name)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("f = 3", "int"),
        ("class f:\n    pass", "class"),
        ("def f(images):\n    pass", r"\(images\).*\(images, prompts, metadata\)$"),
        ("def f(a, b, c, d):\n    pass", r"\(a, b, c, d\)"),
        ("def f(:\n", r"SyntaxError: .*\n  .*invalid.py, line 1: def f\(:$"),
        ("\nimport no_such", r"'no_such'\n  .*invalid.py, line 2, in <module>: im"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3\n  .*invalid.py, line 2, in"),
        ("import json\njson.loads('{')", r"JSONDecodeError: .*\n  .*invalid.py, line 2, in"),
    ],
)
def test_an_invalid_function_is_refused(folder, code, message):
    (folder / "invalid.py").write_text(code)
    with pytest.raises(
        ConfigError, match=rf"(?s)^config.rewards\[0\]: reward 'invalid:f' .*{message}"
    ):
        asked("invalid:f")


@pytest.mark.parametrize(
    "form", ["lambda *_: 1", "lambda i, p, m, k=2: 1", "(lambda i, prompts, metadata: 1)"]
)
def test_arguments_may_have_any_names(folder, form):
    (folder / "lenient.py").write_text(f"f = {form}\n")
    assert function("lenient:f")(IMAGES, PROMPTS, METADATA) == 1


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
def test_an_exception_has_the_users_lines(folder, line, error):
    inner = f"import sys\nimport numpy as np\ndef inner(images):\n    {line}\n"
    (folder / "raising.py").write_text(f"{inner}def f(images, *_):\n    return inner(images)\n")
    with pytest.raises(ConfigError) as caught:
        asked("raising:f").score(IMAGES, PROMPTS, METADATA)
    file = folder / "raising.py"
    assert str(caught.value).splitlines() == [
        f"reward 'raising:f' raised {error}",
        f"  {file}, line 6, in f: return inner(images)",
        f"  {file}, line 4, in inner: {line}",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class OnDevice:
    """A tensor that numpy cannot read before it is on the host, as one of torch on a GPU."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __array__(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy.\nUse Tensor.cpu()")

    def detach(self):
        return self

    def cpu(self):
        return self.tensor


VALUES = [0.5, -2.0, 3.25]  # exact in every dtype


@pytest.mark.parametrize(
    "form",
    [
        "torch.tensor(VALUES, dtype=torch.bfloat16)",
        "torch.tensor(VALUES, dtype=torch.float16)",
        "torch.tensor(VALUES, requires_grad=True) * 1",
        "torch.nn.Parameter(torch.tensor(VALUES))",
        "OnDevice(torch.tensor(VALUES, dtype=torch.bfloat16))",
        "[OnDevice(torch.tensor(one)) for one in VALUES]",
        "list(torch.tensor(VALUES, dtype=torch.bfloat16, requires_grad=True))",
        "tuple(torch.tensor(VALUES, requires_grad=True))",
        "jnp.array(VALUES, jnp.bfloat16)",
        "list(jnp.array(VALUES, jnp.bfloat16))",
        "np.array(VALUES, jnp.float8_e4m3fn)",
    ],
)
def test_tensors_of_other_dtypes_devices_and_with_gradients_are_converted(form):
    import jax.numpy as jnp
    import torch

    scores = eval(form, globals() | {"torch": torch, "jnp": jnp})
    np.testing.assert_array_equal(call(scores), np.float32(VALUES))
    named = answer({"f": scores, "other": scores})
    np.testing.assert_array_equal(named.columns[:, 0], np.float32(VALUES))
    np.testing.assert_array_equal(named.shown["mine:f/other"], np.float32(VALUES))


class Unreadable:
    def __init__(self, error):
        self.error = error

    def __array__(self, *args, **kwargs):
        raise self.error


def test_scores_that_cannot_be_converted_are_refused_in_one_line():
    import torch

    wrong = [["a", "b", "c"], [1j, 2, 3], [None, 1, 2]]
    wrong += [Unreadable(error) for error in (RuntimeError("no\narray"), TypeError(), KeyError(3))]
    on_meta = torch.zeros(3, device="meta")
    for scores in (
        *wrong,
        wrong[3:4] * 3,
        on_meta,
        [on_meta] * 3,
        [[1, 2], [3], [4]],
        on_meta * 1j,
        None,
    ):
        with pytest.raises(RewardError) as caught:
            call(scores)
        assert "'mine:f'" in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (0.5, "shape () for 3"),
        ([1.0, 2.0], "shape (2,) for 3"),
        (np.zeros((3, 1)), "shape (3, 1) for 3"),
        ([0.0, np.nan, 1.0], "nan for image 1 ('two')"),
        ([0.0, -np.inf, 1.0], "-inf for image 1 ('two')"),
        ([0.0, 1e60, 1.0], "1e+60 for image 1 ('two')"),
        ([0.0, 1e30, 1.0], "1e+30 for image 1 ('two')"),
    ],
    ids=str,
)
def test_a_wrong_shape_or_value_is_refused(scores, message):
    with pytest.raises(RewardError, match=re.escape(f"'mine:f' returned {message}")):
        call(scores)
