"""Views of an image, whose outputs an evaluation and a prediction average: `evaluate.views`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from isobatch.errors import ConfigError

MIRRORED, CORNERS = {"flip", "ten"}, {"five", "ten"}
COUNT = {"one": 1, "flip": 2, "five": 5, "ten": 10}  # forwards of a batch


def averaged(output: Callable[[Any], Any], inputs: Any, views: str, shape: Sequence[int]) -> Any:
    """The mean of `output` over the views of `inputs`.

    Args:
        shape: of an input in training, (C, height, width): as large is each of the five parts of an image.
    Raises:
        ConfigError: there are no images, none larger than those parts, or no class scores.
    """
    if views == "one":
        return output(inputs)
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        raise ConfigError("evaluate.views", views, "is of images, and these inputs are none", "set evaluate.views=one")
    total, count = None, 0
    for view in views_of(inputs, views, shape):
        scores = output(view)
        if not isinstance(scores, Tensor) or scores.ndim != 2:
            raise ConfigError("evaluate.views", views, "averages class scores, and this model answers something else",
                              "set evaluate.views=one")  # fmt: skip
        total, count = scores if total is None else total + scores, count + 1
    assert total is not None
    return total / count


def views_of(images: Tensor, views: str, shape: Sequence[int]) -> Iterator[Tensor]:
    """`flip`: the images and their mirror images; `five`: their corners and center; `ten`: these and their mirror images."""
    for part in parts_of(images, views, shape) if views in CORNERS else [images]:
        yield part
        if views in MIRRORED:
            yield part.flip(-1)


def parts_of(images: Tensor, views: str, shape: Sequence[int]) -> Iterator[Tensor]:
    (tall, wide), (height, width) = images.shape[2:], shape[-2:]
    down, right = tall - height, wide - width
    if min(down, right) < 0 or not down + right:
        raise ConfigError("evaluate.views", views, f"takes parts of {height} x {width} pixels, as in training, and the images "
                          f"of the evaluation have {tall} x {wide}",
                          "set data.eval_size to a larger size (and data.crop_pct=1)")  # fmt: skip
    for top, left in ((0, 0), (0, right), (down, 0), (down, right), (round(down / 2), round(right / 2))):
        yield images[:, :, top : top + height, left : left + width]
