"""`[data.map]`: where strangers' records hold what a trace needs, by dotted paths. `inputs` reads by them."""

from dataclasses import dataclass, fields

from tracegrad.errors import ArgumentError

MOST_CHARACTERS = 1000


@dataclass(frozen=True)
class Map:
    """Where the fields of a trace stand in the records of a file.

    >>> Map(reward="metadata.score", group="prompt").told()
    {'reward': 'metadata.score', 'group': 'prompt'}
    """

    reward: str = ""
    """Path of the reward: a number, a boolean, either as text, a word such as pass, or an object of these by name."""
    group: str = ""
    """Path of what the traces of one prompt share, or prompt: traces whose first messages are equal share a group."""
    session: str = ""
    """Path of what the calls of one conversation share, or prefix: a call goes on the one that it begins with."""
    order: str = ""
    """Path of a number or time that orders the calls of a session; empty: their order in the file."""
    id: str = ""
    """Path of the trace's id."""
    logprob_kind: str = ""
    """Path of raw, processed or unknown: what the logprobs of a record are of."""
    temperature: str = ""
    """Path of the sampling temperature."""
    sampling: str = ""
    """Path of an object with the sampling options: temperature, top_p, top_k, min_p, penalties, logit_bias."""
    version: str = ""
    """Path of the policy version: a whole number, also as text such as v7."""

    def __post_init__(self) -> None:
        for name, path in self.told().items():
            if not isinstance(path, str) or len(path) > MOST_CHARACTERS or not all(path.split(".")):
                raise ArgumentError(
                    f"map.{name} is {path!r:.80}. It would name nothing. Give a dotted path such as metadata.score."
                )
        if self.order and not self.session:
            raise ArgumentError(
                "map.order is told and map.session is not. Without sessions there is nothing to order. Tell both."
            )

    def told(self) -> dict[str, str]:
        """The paths that are told."""
        return {each.name: path for each in fields(self) if (path := getattr(self, each.name)) != ""}
