"""Draw pictures with two equal shapes of one colour and two equal digits, and write them as rows with images.

Position, size, angle, tint, background and noise are random, so no two pictures are alike. A tenth of all combinations of shape,
colour and digit is kept out of the training rows, to test combinations that no training row has.
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 48  # pixels
SCALE = 4  # drawn so many times as large, then scaled down
QUESTION = "Caption:"
COLOURS = {
    "red": (205, 50, 50), "green": (50, 150, 60), "blue": (50, 80, 205), "yellow": (215, 190, 45), "purple": (140, 60, 170), "orange": (235, 130, 40),
}  # fmt: skip
CORNERS = {"circle": 32, "triangle": 3, "square": 4, "star": 5}
COMBINATIONS = list(itertools.product(COLOURS, CORNERS, range(10)))
NEW = [COMBINATIONS[number] for number in np.random.default_rng(0).permutation(len(COMBINATIONS))[::10]]
KNOWN = [each for each in COMBINATIONS if each not in NEW]

Combination = tuple[str, str, int]


def draw(combination: Combination, random: np.random.Generator) -> Image.Image:
    """Return a picture of `SIDE` x `SIDE` pixels: the shape in two of its quarters, the digit in the others."""
    colour, shape, digit = combination
    background = _tinted([random.uniform(195, 240)] * 3, 6, random)
    image = Image.new("RGB", (SIDE * SCALE, SIDE * SCALE), background)
    pen = ImageDraw.Draw(image)
    for number, quarter in enumerate(random.permutation(4)):
        middle = SIDE * SCALE * (np.array([quarter % 2, quarter // 2]) / 2 + 0.25)
        middle = middle + SCALE * random.uniform(-1, 1, 2)
        if number < 2:
            outline = _outline(shape, middle, SCALE * random.uniform(8.5, 10), random.uniform(-0.1, 0.1))
            pen.polygon(outline, fill=_tinted(COLOURS[colour], 12, random))
        else:
            font, ink = ImageFont.load_default(size=SCALE * random.uniform(23, 26)), _tinted([40] * 3, 12, random)
            pen.text(tuple(middle), str(digit), fill=ink, font=font, anchor="mm", stroke_width=SCALE // 2)
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32)
    noisy = small + random.normal(0, 8, small.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def _tinted(colour: Sequence[float], spread: float, random: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(each) for each in np.clip(np.array(colour) + random.normal(0, spread, 3), 0, 255))


def _outline(shape: str, middle: np.ndarray, radius: float, angle: float) -> list[tuple[float, float]]:
    """Return the corners of a shape, which is turned by an angle from where it stands upright."""
    corners = CORNERS[shape]
    radii = (radius * 1.2, radius * 0.5) if shape == "star" else (radius * {3: 1.25, 4: 1.15}.get(corners, 1.0),)
    number = corners * len(radii)
    first = angle - math.pi / 2 + (math.pi / 4 if shape == "square" else 0)
    turns = [first + 2 * math.pi * each / number for each in range(number)]
    return [
        (middle[0] + radii[each % len(radii)] * math.cos(turn), middle[1] + radii[each % len(radii)] * math.sin(turn))
        for each, turn in enumerate(turns)
    ]


def write_rows(folder: Path, combinations: list[Combination], count: int, seed: int) -> Path:
    """Write some pictures and a file of rows about them; return the file."""
    (folder / "pictures").mkdir(parents=True)
    random, rows = np.random.default_rng(seed), []
    for number in range(count):
        combination = combinations[random.integers(len(combinations))]
        name = f"pictures/{number:05}.png"
        draw(combination, random).save(folder / name)
        turns = (("user", f"<image>{QUESTION}"), ("assistant", "{} {} {}".format(*combination)))
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns], "images": [name]})
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return rows with their pictures, as they are in the files."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row | {"picture": Image.open(path.parent / row["images"][0]).convert("RGB")} for row in rows]


def answer_of(row: dict[str, Any]) -> str:
    """Return the caption in a row."""
    return str(row["messages"][-1]["content"])
