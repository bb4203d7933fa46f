"""Where squares and discs are in a picture: torchvision's detector, boxes without a common number, average precision."""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOS, FCOSHead

import isobatch

SIDE, MOST = 64, 8  # pixels of a picture; boxes that a sample and an answer have room for
NOTHING = -1  # the label of room that is not used


class Shapes:
    """(3, 64, 64) uint8 -> one to three boxes (left, top, right, bottom) with their labels. Picture i is drawn from i."""

    classes = ("square", "disc")

    def __init__(self, split: str, pictures: int = 640):
        self.start, self.pictures = (0, pictures) if split == "train" else (10**6, max(1, pictures // 5))

    def __len__(self) -> int:
        return self.pictures

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(self.start + index)
        image = torch.randint(0, 60, (3, SIDE, SIDE), generator=draw, dtype=torch.uint8)
        down, right = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        boxes, labels = [], []
        for place in torch.randperm(4, generator=draw)[: int(torch.randint(1, 4, (), generator=draw))].tolist():
            kind, radius, x, y = (
                int(torch.randint(low, high, (), generator=draw)) for low, high in ((0, 2), (5, 12), (0, 8), (0, 8))
            )
            x, y = 32 * (place % 2) + 12 + x, 32 * (place // 2) + 12 + y
            away = torch.stack([(right - x).abs(), (down - y).abs()]).float()
            image[:, (away.norm(dim=0) if kind else away.amax(0)) <= radius] = 200
            boxes.append([x - radius, y - radius, x + radius + 1, y + radius + 1])
            labels.append(kind)
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}


def with_room(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Boxes (N, MOST, 4), labels (N, MOST) and what else there is of each box: every sample has a row, as in any batch."""
    made = {}
    for key, one in found[0].items():
        made[key] = one.new_full((len(found), MOST, *one.shape[1:]), NOTHING if key == "labels" else 0)
        for row, each in zip(made[key], found, strict=True):
            row[: len(each[key])] = each[key][:MOST]
    return made


def collate(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A detector of torchvision's wants to see the boxes in training, so they are inputs and targets both."""
    boxes = with_room([target for _, target in samples])
    return {"images": torch.stack([image for image, _ in samples]), **boxes}, boxes


class Head(FCOSHead):
    """Its losses as sums, with the number of places that they are means over: a window is then weighed by places."""

    def compute_loss(self, targets: Any, outputs: Any, anchors: Any, matched: list[Tensor]) -> dict[str, Tensor]:
        count = torch.stack([(places >= 0).sum() for places in matched]).sum()
        means = super().compute_loss(targets, outputs, anchors, matched)
        return {**{name: mean * count.clamp(min=1) for name, mean in means.items()}, "count": count}


class Detector(nn.Module):
    """images, boxes, labels -> its losses; in evaluation also what it finds, with room for MOST boxes."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 32):
        super().__init__()
        backbone = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, stride=s, padding=1), nn.GroupNorm(8, b), nn.ReLU())
              for a, b, s in ((in_chans, width, 2), (width, width, 2), (width, width, 1), (width, width, 2))),
        )  # fmt: skip
        backbone.out_channels = width
        head, anchors = Head(width, 1, num_classes, 1), AnchorGenerator(((8,),), ((1.0,),))
        self.net = FCOS(backbone, num_classes, anchor_generator=anchors, head=head, min_size=SIDE, max_size=SIDE,
                        image_mean=[0.5] * 3, image_std=[0.25] * 3, detections_per_img=MOST)  # fmt: skip

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Any]:
        there = [{"boxes": b[kind != NOTHING], "labels": kind[kind != NOTHING]} for b, kind in zip(boxes, labels, strict=True)]
        found = {} if self.training else with_room(self.net(list(images)))
        self.net.training = True  # the losses, whatever else its parts are told
        losses = self.net(list(images), there)
        self.net.training = self.training
        return {"losses": losses, **found}


def places(output: dict[str, Any], _: Any) -> dict[str, Any]:
    """The mean of torchvision's three losses over all places of the window that belong to a box."""
    losses = dict(output["losses"])
    count = losses.pop("count")
    return {"loss": isobatch.Sum(sum(losses.values()), count)}


isobatch.register("data", "shapes", Shapes)
isobatch.register("collate", "boxes", collate)
isobatch.register("model", "detector", Detector)
isobatch.register("loss", "places", lambda: places)
