"""A taskset of verifiers (its v1): found by the interpreter that has verifiers. It does not depend on tracegrad.

Played by verifiers_door.py.
"""

import verifiers.v1 as vf

SYSTEM = "You are the clerk of a shop. Look up prices and stock, then answer the customer by name."


class Offer(vf.TaskData):
    total: str


class Clerk(vf.Task[Offer]):
    @vf.reward
    async def right(self, trace) -> float:
        """Return 1 if the answer contains the total."""
        return float(self.data.total in (trace.last_reply or ""))


class Offers(vf.Taskset[Clerk, vf.TasksetConfig]):
    def load(self):
        """Offers of all sizes."""
        for price in range(10, 50):
            for pieces in range(2, 7):
                prompt = f"Ben: at the offer of {price} €, what is the total for {pieces} × red lamp?"
                offer = Offer(system_prompt=SYSTEM, prompt=prompt, total=f"{price * pieces} €")
                yield Clerk(offer, self.config.task)


__all__ = ["Offers"]
