"""Group `data`: what is trained and evaluated on. Each class loads two splits and says what a model needs to know.

An options class has `load(augment, seed) -> Splits`, `kind` (images | vectors) and `num_workers`; with a `check()` it refuses
what this machine does not have (a missing folder) before torch is imported. `augment` is what the group of that name
made for it: see augment.SampleTransform.
"""

from __future__ import annotations

from typing import Any

from isobatch.data.base import DataInfo, Split, Splits
from isobatch.data.csv_file import CsvFile
from isobatch.data.hugging_face import HuggingFace
from isobatch.data.image_folder import ImageFolder
from isobatch.data.in_memory import Diabetes, Digits, RandomMatrix, Synthetic
from isobatch.data.mask_folder import MaskFolder
from isobatch.data.torchvision_sets import TorchVision
from isobatch.data.webdataset import WebDataset
from isobatch.marks import Marks

__all__ = ["MARKS", "TABLE", "DataInfo", "Split", "Splits"]

TABLE: dict[str, Any] = {
    "digits": Digits,
    "diabetes": Diabetes,
    "random_matrix": RandomMatrix,
    "synthetic": Synthetic,
    "image_folder": ImageFolder,
    "mask_folder": MaskFolder,
    "csv": CsvFile,
    "torchvision": TorchVision,
    "webdataset": WebDataset,
    "hugging_face": HuggingFace,
}
MARKS = Marks(speed=True)
