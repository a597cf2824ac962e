"""The task: pictures of coloured shapes, the question how many are red, and the check of an answer.

Needs only Pillow. make_model.py pretrains on these pictures, record.py records answers, evaluate.py measures success.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE = 56
CELL = 14
TOTAL = 8
ASKED = "red"
QUESTION = f"How many {ASKED} shapes?"
COLOURS = {"red": (240, 20, 20), "green": (20, 220, 20), "blue": (30, 30, 250)}
KINDS = ("circle", "square", "triangle")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
SPLITS = ("pretrain", "traces", "evaluation")


@dataclass(frozen=True)
class Shape:
    """One shape: its cell of the 4 x 4, its kind and colour, and its left, top and size in the cell, in pixels."""

    cell: int
    kind: str
    colour: str
    left: int
    top: int
    size: int


@dataclass(frozen=True)
class Scene:
    """Return a picture; `paper` is the dark grey of the background."""

    shapes: tuple[Shape, ...]
    paper: int

    @property
    def split(self) -> str:
        """The one split that this layout belongs to: six eighths pretrain, one traces, one evaluation."""
        bucket = hashlib.sha256(repr(self.shapes).encode()).digest()[0] % 8
        return "evaluation" if bucket == 7 else "traces" if bucket == 6 else "pretrain"

    def count(self, colour: str) -> int:
        return sum(shape.colour == colour for shape in self.shapes)

    @property
    def answer(self) -> str:
        return NUMBERS[self.count(ASKED)]

    def picture(self) -> Image.Image:
        image = Image.new("RGB", (SIDE, SIDE), (self.paper,) * 3)
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            left, top = CELL * (shape.cell % 4) + shape.left, CELL * (shape.cell // 4) + shape.top
            right, bottom = left + shape.size, top + shape.size
            if shape.kind == "circle":
                draw.ellipse((left, top, right, bottom), COLOURS[shape.colour])
            elif shape.kind == "square":
                draw.rectangle((left, top, right, bottom), COLOURS[shape.colour])
            else:
                draw.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), COLOURS[shape.colour])
        return image

    def data_url(self) -> str:
        """The picture as a request carries it."""
        file = io.BytesIO()
        self.picture().save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    def messages(self) -> list[dict]:
        url = {"type": "image_url", "image_url": {"url": self.data_url()}}
        return [{"role": "user", "content": [url, {"type": "text", "text": QUESTION}]}]


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Endless scenes of one split: eight shapes, one to four of them red, each number as often."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    generator = random.Random(f"{split}/{seed}")
    while True:
        scene = _draw(generator)
        if scene.split == split:
            yield scene


def _draw(generator: random.Random) -> Scene:
    count = generator.randint(1, 4)
    colours = [ASKED] * count + generator.choices([colour for colour in COLOURS if colour != ASKED], k=TOTAL - count)
    shapes = []
    for cell, colour in zip(generator.sample(range(16), len(colours)), colours, strict=True):
        size = generator.randint(8, 11)
        left, top = generator.randint(1, 12 - size), generator.randint(1, 12 - size)
        shapes.append(Shape(cell, generator.choice(KINDS), colour, left, top, size))
    return Scene(tuple(sorted(shapes, key=lambda shape: shape.cell)), generator.randint(0, 30))


def wrong(scene: Scene, generator: random.Random) -> str:
    """An answer that is not right: as many as another colour has, or one more or fewer."""
    right = scene.count(ASKED)
    counts = [scene.count(colour) for colour in COLOURS] + [right - 1, right + 1]
    return NUMBERS[generator.choice([count for count in counts if count != right])]


def check(scene: Scene, text: str, ended: bool) -> float:
    """Return 1.0 if the answer is only the number, and ended; else 0.0."""
    return float(ended and text == scene.answer)
