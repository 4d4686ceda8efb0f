"""Converts a scheduler's measurements into the layout and costs of a simulation."""

from collections.abc import Mapping
from statistics import fmean

from digen_jax.scheduling.commands import TRAINER
from digen_jax.scheduling.costs import CostModel
from digen_jax.scheduling.planner.simulate import Layout, Mesh
from digen_jax.scheduling.settings import Costs


def learned(model: CostModel, devices: Mapping[str, int]) -> tuple[Layout, Costs]:
    """The workers, by their measured speeds, and the measured costs.

    Args:
      model: of a scheduler whose workers all joined at speed 1.
      devices: the number of each worker, the trainer included.

    Scores become a latency that includes the queue at the scorers: simulate them with any number of scorers.
    """
    rollout = [name for name in devices if name != TRAINER]

    def seconds(kind: str, worker: str = TRAINER) -> float:
        return model.predict(kind, worker, 1.0)

    def making(worker: str) -> float:
        return seconds("generate", worker) + seconds("decode", worker)

    def mesh(worker: str) -> Mesh:
        return Mesh(devices[worker], typical / making(worker))

    makers = rollout or [TRAINER]
    typical = fmean(map(making, makers))
    costs = Costs(
        generate=fmean(seconds("generate", name) for name in makers) / model.images,
        decode=fmean(seconds("decode", name) for name in makers) / model.images,
        train=seconds("train") / model.images,
        encode=fmean(seconds("encode", name) for name in makers),
        score_latency=seconds("score", ""),
        update=seconds("update"),
        publish=fmean(seconds("publish", name) for name in makers),
        switch=seconds("switch"),
        deliver=fmean(seconds("deliver", name) for name in makers) / model.images,
    )
    return Layout(mesh(TRAINER), tuple(map(mesh, rollout))), costs
