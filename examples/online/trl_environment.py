"""A class made for TRL's `environment_factory`, and a reward function made for TRL, as they are.

    python examples/online/trl_environment.py --python .venv-vllm/bin/python --out out/trl

In TRL: `GRPOTrainer(model, reward_funcs=correct, train_dataset=..., environment_factory=Shop)`.
"""

from clerk import correct, look_up, questions, told

import tracegrad as tg


class Shop:
    """`reset` gets the columns of the task; public methods are tools. It imports nothing of ours or of TRL's."""

    def reset(self, customer, **columns):
        self.customer = customer
        return None

    def price(self, item: str) -> str:
        """Price of one item in €.

        Args:
            item: the item.
        """
        return look_up(self.customer, "price", item)

    def stock(self, item: str) -> str:
        """How many of an item are left.

        Args:
            item: the item.
        """
        return look_up(self.customer, "stock", item)


if __name__ == "__main__":
    tg.online.train(tasks=questions(), environment=Shop, rewards=[correct], **told())
