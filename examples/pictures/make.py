"""Pictures of several real handwritten digits each, with what is in them: python make.py FOLDER [how many]

FOLDER/{train,val}/images/*.png, the class of every pixel in FOLDER/{train,val}/masks/*.png (0: paper, 1 .. 5: the ink of a
digit 0 .. 4), and in train.csv and val.csv which digits there are and how many.
"""

import csv
import sys
from pathlib import Path

import numpy
from PIL import Image
from sklearn.datasets import load_digits

SIDE, KINDS = 48, 5
Array = numpy.ndarray


def picture(draw: numpy.random.Generator, digits: Array, labels: Array) -> tuple[Array, Array, list[int]]:
    """(pixels, class of each pixel, the digits) of one to three digits, each 16 pixels wide, none over another."""
    image, mask, there = numpy.zeros((SIDE, SIDE)), numpy.zeros((SIDE, SIDE), dtype=numpy.uint8), []
    for place in draw.permutation(9)[: draw.integers(1, 4)]:
        chosen = draw.choice(len(digits))
        ink = numpy.kron(digits[chosen], numpy.ones((2, 2))) / 16 * 255
        down, right = 16 * (place // 3), 16 * (place % 3)
        image[down : down + 16, right : right + 16] = ink
        mask[down : down + 16, right : right + 16] = (ink > 100) * (1 + labels[chosen])
        there.append(int(labels[chosen]))
    return (image + draw.normal(0, 10, image.shape)).clip(0, 255).astype(numpy.uint8), mask, there


def main(folder: Path, count: int) -> None:
    data = load_digits()
    few = data.target < KINDS
    digits, labels = data.images[few], data.target[few]
    draw = numpy.random.default_rng(0)
    for split, part, pictures in (("train", slice(0, 700), count), ("val", slice(700, None), max(2, count // 5))):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True, exist_ok=True)
        with (folder / f"{split}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", *(f"has_{k}" for k in range(KINDS)), "digits"])
            for i in range(pictures):
                image, mask, there = picture(draw, digits[part], labels[part])
                Image.fromarray(image).save(folder / split / "images" / f"{i}.png")
                Image.fromarray(mask).save(folder / split / "masks" / f"{i}.png")
                table.writerow([f"{split}/images/{i}.png", *(int(k in there) for k in range(KINDS)), len(there)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
