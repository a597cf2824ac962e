"""One turn, scored by functions in TRL's convention, over groups.

python examples/online/one_turn.py --python .venv-vllm/bin/python --out out/one_turn
"""

from clerk import correct, customers, told

import tracegrad as tg


def short(completions, **columns):
    """A little for an answer in few words."""
    return [max(0.0, 1 - len(messages[-1]["content"] or "") / 100) for messages in completions]


if __name__ == "__main__":
    # Customers who make an offer: no tool is needed.
    tg.online.train(tasks=customers("offer"), rewards=[correct, short], reward_weights=[1.0, 0.1], **told())
