"""Give a group of trajectories for an LLM judge."""

START = [{"role": "system", "content": "You are a clerk."}, {"role": "user", "content": "2 lamps?"}]


def trajectory(text, **more):
    return [*START, {"role": "assistant", "content": text, **more}]


GROUP = [trajectory(text) for text in ("alpha", "beta", "gamma", "delta")]
