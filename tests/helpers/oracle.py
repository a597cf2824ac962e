"""What a recorder's texts determine of the ids, by exhaustive search: the oracle of test_recover.

Nothing here is shared with the aligner. A recorder decodes tokens one by one, as vLLM does: a token whose text ends in
U+FFFD shows nothing, unless it completes a character, and then it shows the text from the token in which that began.
`possible` walks through every id of the vocabulary at every place and keeps what some complete list of ids explains.
"""

import functools
import sys

BAD = "\ufffd"


def decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def one_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@functools.cache
def begins(data: bytes) -> bool:
    """Whether more bytes can make one character of it. Python's own incremental decoder also waits on ED A0."""
    return any(one_character(data + more * k) for more in (b"\x80", b"\xbf") for k in (1, 2, 3))


@functools.lru_cache(1 << 20)
def fed(pending: bytes, token: bytes) -> tuple[str, bytes]:
    """Text that is complete after `token`, and the bytes that wait for more."""
    data = pending + token
    waiting = next((k for k in (3, 2, 1) if len(data) >= k and begins(data[-k:])), 0)
    return decode(data[: len(data) - waiting]), data[len(data) - waiting :]


@functools.lru_cache(1 << 20)
def shown(front: bytes, token: bytes) -> tuple[str, bytes]:
    """What is shown of `token`, and the bytes from the token in which the waiting character began ("" if none waits).

    `front` is that of the tokens before. Older tokens cannot matter: the character does not reach into them.
    """
    if not decode(token).endswith(BAD):
        return decode(token), b""
    joint = decode(front + token)
    waiting = fed(b"", front + token)[1]
    if front and not joint.endswith(BAD):
        return joint, b""
    if not waiting:
        return "", b""
    return "", token if len(waiting) <= len(token) and fed(b"", token)[1] == waiting else front + token


@functools.cache
def future(waiting: bytes) -> int:
    """A number that two beginnings of a character share if every byte does the same to both."""
    if len(waiting) > 1:  # from here on every continuation byte joins
        return -10 * (3 if waiting[0] < 0xF0 else 4) - 2 * len(waiting) - (waiting == b"\xef\xbf")
    kinds: list[str] = []
    for byte in range(256):
        text, rest = fed(waiting, bytes([byte]))
        joined = rest[:-1] == waiting and not text
        kinds.append(f"waits {future(rest)}" if joined else f"gives {BAD in text} {text == BAD} {len(rest)}")
    return FUTURES.setdefault(tuple(kinds), len(FUTURES))


FUTURES: dict[tuple[str, ...], int] = {}
ALIKE: dict[int, bytes] = {}


class Oracle:
    """Ids by what they show, for one vocabulary.

    Args:
        pieces: id to bytes.
        special: ids of special tokens, with their texts in `pieces`.
    """

    def __init__(self, pieces: dict[int, bytes], special: set[int]) -> None:
        self.special = special
        self.pieces = pieces
        self.ordinary = {i: b for i, b in pieces.items() if i not in special}
        self.open = [i for i, b in self.ordinary.items() if decode(b).endswith(BAD)]
        self.by_text: dict[str, list[int]] = {}
        for i, b in pieces.items():
            self.by_text.setdefault(decode(b), []).append(i)

    def possible(
        self, texts: list[str], whole: str, *, hides_specials: bool, skips_specials: bool, goes_on: bool
    ) -> list[set[int]]:
        """For each token the ids that it may have; empty sets where nothing explains the record.

        Args:
            texts: what is shown of each token.
            whole: text of the generation, without parts of characters at its end.
            hides_specials: whether a special token may show nothing.
            skips_specials: whether special tokens are left out of `whole`.
            goes_on: whether tokens may stand behind `whole` that are not in it (a stop string or token).
        """
        count = len(texts)
        found: list[set[int]] = [set() for _ in texts]
        past = -1

        def candidates(text: str, front: bytes) -> list[int]:
            if text == "":
                return self.open + (sorted(self.special) if hides_specials else [])
            if text[-1].isascii():
                return self.by_text.get(text, [])
            data = text.encode()
            joint = [i for i in self.open if data.endswith(self.pieces[i]) and shown(front, self.pieces[i])[0] == text]
            return joint + [i for i in self.by_text.get(text, ()) if not text.endswith(BAD)]

        def after(at: int, pending: bytes, token: bytes) -> tuple[int, bytes] | None:
            text, pending = fed(pending, token)
            if not whole.startswith(text, at):
                return None
            return at + len(text), pending

        def merged(at: int, pending: bytes, front: bytes) -> tuple[int, bytes, bytes]:
            """Where `whole` has U+FFFD next, what waits will be broken: only what may still join it matters."""
            if pending and at != past and whole[at : at + 1] == BAD and fed(b"", front)[1] == pending:
                pending = front = ALIKE.setdefault(future(pending), pending)
            return at, pending, front

        @functools.cache
        def walk(index: int, at: int, pending: bytes, front: bytes) -> bool:
            if index == count:
                return at in (past, len(whole))
            explained = False
            ended = at == past or (at == len(whole) and not pending)
            for token in candidates(texts[index], front):
                steps = []
                data = self.pieces[token]
                text, next_front = ("", b"") if token in self.special else shown(front, data)
                if token not in self.special and text != texts[index]:
                    continue
                if token in self.special and (skips_specials or at == past):
                    steps.append((at, pending))
                elif at != past and (step := after(at, pending, data)):
                    steps.append(step)
                first = 0 if index + 1 == count else 1
                ends = (after(at, pending, data[:k]) == (len(whole), b"") for k in range(first, len(data)))
                if (ended and texts[index] == "") or (goes_on and texts[index] and (at == past or any(ends))):
                    steps.append((past, b""))
                for step in steps:
                    if walk(index + 1, *merged(*step, next_front)):
                        found[index].add(token)
                        explained = True
            return explained

        sys.setrecursionlimit(max(sys.getrecursionlimit(), 4 * count + 1000))
        walk(0, 0, b"", b"")
        return found
