"""Configs of the tests: changes of a config by field, and the settings that methods need."""

from ml_collections import ConfigDict

ODE = dict(sampler__kind="ode", sampler__window=dict(length=0), sampler__noise_level=0.0)
FORWARD = {
    "diffusion_nft": ODE | dict(algorithm=dict(name="diffusion_nft", times=dict(count=7))),
    "awm": ODE | dict(algorithm=dict(name="awm")),
    "crd": ODE | dict(algorithm=dict(name="crd", times=dict(count=7))),
    "dgpo": ODE | dict(algorithm=dict(name="dgpo")),
    "diffusion_dpo": ODE | dict(algorithm=dict(name="diffusion_dpo"), trainer__micro_batch=24),
}
TWO = dict(rewards=("shapes_geneval", "tests.parallel.toy:brightness"))
DYNAMIC = dict(sampler__chunk=12, trainer__micro_batch=12)
EARLY = dict(
    runtime__max_incomplete_groups=2,
    algorithm__old_log_probs="current",
    sampler__chunk=4,
    trainer__micro_batch=4,
)


def changed(given: ConfigDict, **fields) -> ConfigDict:
    """`given` with other values; "__" is the dot of a field's name."""
    for name, value in fields.items():
        *groups, last = name.split("__")
        holder = given
        for group in groups:
            if group not in holder:
                holder[group] = ConfigDict()
            holder = holder[group]
        with holder.ignore_type():
            holder[last] = ConfigDict(value) if type(value) is dict else value
    return given
