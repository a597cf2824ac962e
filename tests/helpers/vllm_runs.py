"""Run the online loop against a real vLLM."""

import online
import tracegrad as tg
from tracegrad.online import OnlineConfig, RolloutConfig

CONFIG = tg.config.Config(train=tg.config.Train(groups_per_step=4), optimizer=tg.config.Optimizer(lr=4e-4))


def run(example, url, out, *, config=CONFIG, key=None, **told):
    """Steps of four groups of four."""
    options = {"temperature": told.pop("temperature", 1.0), **told.pop("rollout", {})}
    play = RolloutConfig(group_size=4, max_tokens=64, max_turns=4, **options)
    return tg.online.train(
        example / "model",
        online.tasks("traces", 0),
        environment=online.Shop,
        objective=tg.presets.DAPO_DIRECT,
        config=config,
        online=OnlineConfig(**{"steps": 3, "steps_ahead": 0, **told}),
        rollout=play,
        servers=[url],
        key=key,
        out=out,
        sinks=(),
    )
