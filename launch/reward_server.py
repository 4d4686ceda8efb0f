"""Serves rewards over HTTP to training runs.

python launch/reward_server.py --reward shapes_geneval --prompts assets/prompts/shapes_heldout.jsonl
python launch/reward_server.py --reward my_rewards:aesthetics --processes=4 --port=8100 --batch=32
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import dataclasses
import os
from typing import Any, cast

from absl import flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import ConfigError, check_range, user_input
from digen_jax.files import parse_json
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.service.wire import TOKEN, Limits, server_packages

SIDE = 64  # pixels per side of the dry run's images

_REWARD = flags.DEFINE_multi_string(
    "reward", None, "Built-in reward, or module:function; can be repeated."
)
_SETTINGS = flags.DEFINE_multi_string(
    "settings", [], "Settings of each reward in JSON, such as '{\"threads\": 2}'."
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 means all.")
_PORT = flags.DEFINE_integer("port", 8100, "Port; 0 means any free port, which is printed.")
_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes that score in parallel.")
_PROMPTS = define_path(
    "prompts", None, "Prompt file for the dry run; by default a single prompt without metadata."
)
_PATIENCE = flags.DEFINE_float("patience", 30, "Maximum seconds to finish requests after SIGTERM.")
_LIMITS = {
    field.name: (flags.DEFINE_float if field.type is float else flags.DEFINE_integer)(
        field.name, cast(Any, field.default), field.metadata["help"]
    )
    for field in dataclasses.fields(Limits)
}
flags.mark_flags_as_required(["reward"])


def main() -> None:
    """Opens the port, checks the reward, and serves it until a signal arrives."""
    check_range("--processes", _PROCESSES.value, 1)
    check_range("--patience", _PATIENCE.value, 0)
    limits = Limits(**{name: cast(Any, flag.value) for name, flag in _LIMITS.items()})
    limits.check()
    with server_packages():
        import python_multipart  # noqa: F401

        from digen_jax.rewards.service.server import Service, listen, serve

    from digen_jax.images import Size
    from digen_jax.rewards.built_in import resolve
    from digen_jax.rewards.dry_run import dry_run
    from digen_jax.rewards.pool import RewardPool
    from digen_jax.rewards.sanity_check import run_sanity_checks

    records = [{"prompt": "a photo of a cat"}]
    if _PROMPTS.value is not None:
        from digen_jax.data.prompt_files import read_prompt_file

        with user_input():
            records = read_prompt_file(_PROMPTS.value)
    token = os.environ.get(TOKEN) or None
    with user_input():
        rewards = resolve(_sections(), field="", serving=True)
    listener = listen(_HOST.value, _PORT.value, token)
    pool = RewardPool(
        rewards, _PROCESSES.value, limit=lambda expected: limits.score, accelerator=True
    )
    groupwise = any(one.groupwise for one in rewards.members)
    service = Service(pool, rewards.names, _PROCESSES.value, limits, token, groupwise)

    def check() -> None:
        run_sanity_checks(rewards, pool.score)
        dry_run(pool.score, [records], Size(SIDE, SIDE))

    try:
        serve(service, listener, check, _PATIENCE.value)
    except ConfigError as error:
        if _PROMPTS.value is None:
            hint = "if it needs a prompt file's fields, give one by --prompts"
            raise type(error)(f"{error}\n  {hint}") from error
        raise
    finally:
        pool.close()


def _sections() -> list[RewardSettings]:
    """Returns the rewards with their settings; raises ConfigError if they are invalid or too many."""
    settings: list[dict[str, Any]] = []
    for text in _SETTINGS.value:
        try:
            settings.append(parse_json(text))
        except ValueError as error:
            raise ConfigError(f"--settings={text} is not JSON: {error}") from error
        if not isinstance(settings[-1], dict):
            raise ConfigError(f'--settings={text} is no JSON object, such as {{"threads": 2}}')
    names = _REWARD.value or []
    if len(settings) > len(names):
        raise ConfigError(f"--settings is given {len(settings)} times for {len(names)} rewards")
    settings += [{}] * (len(names) - len(settings))
    return [RewardSettings(name, settings=s) for name, s in zip(names, settings, strict=True)]


if __name__ == "__main__":
    run_main(main)
