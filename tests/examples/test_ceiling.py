import functools

import pytest

from digen_jax.models.family import Size
from digen_jax.models.sd3.family import StableDiffusion3
from examples.shapes import ceiling
from examples.shapes.captions import heldout_records
from examples.shapes.reward import shapes_geneval
from tests.pipelines import ROOT

COUNT = 60
FOLDER = ROOT / "assets" / "shapes-sd3"


@functools.cache
def shapes_model():
    family = StableDiffusion3.from_folder(FOLDER)
    return family, family.read(FOLDER, "vae")


@pytest.fixture(scope="module")
def found():
    """Of the first ninth of the prompts, all tasks equally often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling, "heldout_records", lambda tasks: heldout_records(tasks)[:COUNT])
        return ceiling.ceiling(*shapes_model(), Size(32, 32))


def test_the_reward_survives_the_embedded_autoencoder(found):
    rendered, passed = found
    assert len(rendered.scores) == COUNT
    assert rendered.scores.mean() >= 0.99
    assert passed.scores.mean() >= 0.95, passed.metrics()


def test_what_is_rejected_stays_rejected(found):
    # Each picture with the next prompt of its task; six tasks take turns.
    records = found[0].records[6:] + found[0].records[:6]
    prompts = [record["prompt"] for record in records]
    before, after = (
        shapes_geneval(evaluation.clips[:, 0], prompts, records) for evaluation in found
    )
    assert (before == 0).sum() > 0.75 * COUNT
    assert (before == after).mean() >= 0.99
