"""`task=predict` of models that answer for each pixel or letter: pictures of class numbers, the same at any number of ranks."""

from __future__ import annotations

import csv
import types
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from harness import on_ranks, train
from PIL import Image
from torch import Tensor, nn

import isobatch
from isobatch import data, model, writer
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.extend.custom import COLLATES
from isobatch.tasks.predicting import Predictor

SHORT = ("logger=none", "threads=1", "epochs=null", "steps=1", "batch.effective=4", "scheduler=constant", "data.num_workers=0")


class Brightness(nn.Module):
    """Dark, middle or bright: the class of a pixel by its own value, whatever is learnt."""

    def __init__(self, num_classes: int, in_chans: int):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        grey = x.mean(1)
        return torch.stack([-grey, 0.2 - grey.abs(), grey], 1) + self.shift


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for split, count in (("train", 4), ("val", 5)):
        for kind in ("images", "masks"):
            (tmp_path / split / kind).mkdir(parents=True)
        for i in range(count):
            mask = Image.new("L", (8, 8))
            mask.putdata([(k + i) % 3 for k in range(64)])
            mask.save(tmp_path / split / "masks" / f"{i}.png")
            mask.point([0, 128, 255] + [0] * 253).convert("RGB").save(tmp_path / split / "images" / f"{i}.png")
    return tmp_path


def test_a_picture_of_class_numbers_for_every_sample(pictures: Path, tmp_path: Path) -> None:
    isobatch.register("model", "brightness", Brightness)
    try:
        words = (*SHORT, "data=mask_folder", f"data.root={pictures}", "data.image_size=8", "data.crop_pct=1",
                 "data.classes=[dark,middle,bright]", "data.in_chans=1", "data.mean=[0.5]", "data.std=[0.5]", "model=custom",
                 "model.name=brightness", "augment=none")  # fmt: skip
        train(tmp_path / "run", *words)
        asked = (*words, "task=predict", f"resume={tmp_path / 'run'}", "batch.eval=2")
        train(tmp_path / "one", *asked)
        on_ranks(2, tmp_path / "two", lambda ranks: train(tmp_path / "two", *asked, "parallel=ddp", ranks=ranks).result)
        train(tmp_path / "parquet", *asked, "writer=parquet")
    finally:
        del model.TABLE["brightness"]
    with (tmp_path / "one/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["mask"]) for row in rows] == [(f"val/images/{i}.png", f"masks/{i}.png") for i in range(5)]
    for row in rows:  # as data=mask_folder reads them
        with (
            Image.open(tmp_path / "one" / row["mask"]) as found,
            Image.open(pictures / row["name"].replace("images", "masks")) as true,
        ):
            assert found.mode == "L" and found.tobytes() == true.tobytes()
    for name in ("predictions.csv", *(row["mask"] for row in rows)):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert not list(tmp_path.glob("*/*.part"))
    table = pyarrow.parquet.read_table(tmp_path / "parquet/predictions.parquet").to_pylist()
    assert table == [{"index": int(row["index"]), "name": row["name"], "mask": row["mask"]} for row in rows]


def test_letters_many_classes_and_what_is_no_row(tmp_path: Path) -> None:
    about = writer.About((), 5, 12, 300)
    letters = writer.Csv().build(tmp_path, about)
    letters.write(writer.Answered(3, ["a", "b"], None, None, torch.tensor([[1, 299], [7, 8]])))
    letters.close()
    assert (tmp_path / "predictions.csv").read_text().split("\n")[:3] == ["index,name,classes", "3,a,1 299", "4,b,7 8"]
    columns = writer.Columns(about, "csv", tmp_path)
    assert columns.text_of(3, torch.tensor([[1, 299]])) == "masks/03.png"
    columns.done()
    with Image.open(tmp_path / "masks/03.png") as image:
        assert list(image.get_flattened_data() if hasattr(image, "get_flattened_data") else image.getdata()) == [1, 299]
    with pytest.raises(ConfigError, match=r"answer \(a tensor \[2, 3, 4, 5\]\) is no row of a table; register a writer"):
        columns.names(writer.Answered(0, ["a", "b"], None, None, torch.zeros(2, 3, 4, 5, dtype=torch.uint8)))


@pytest.mark.parametrize("whole", [False, True])
def test_scores_of_every_pixel_travel_only_to_a_writer_that_wants_them(whole: bool) -> None:
    answers: Any = Predictor.__new__(Predictor)
    answers.config = types.SimpleNamespace(writer=types.SimpleNamespace(whole=whole))
    answers.trained = types.SimpleNamespace(info=DataInfo("x", (3, 2, 2), 3, labels="pixels"))
    answers.ranks, answers.size = types.SimpleNamespace(is_main=False), 2
    answers.split = [0, 0]
    scores = torch.randn(2, 3, 2, 2)
    found = answers.answered(0, answers.asked(scores))
    assert found.classes.equal(scores.argmax(1)) and found.classes.dtype == torch.uint8
    assert (found.outputs is scores) == whole and (found.outputs is None) != whole
    numbers = torch.tensor([1, 2])  # a model that answers with whole numbers is not taken for one of pixels
    assert answers.answered(0, answers.asked(numbers)).outputs is numbers


def test_a_collate_of_ones_own_makes_the_batches_here_too(tmp_path: Path) -> None:
    class Lines:
        num_classes = 4

        def __init__(self, split: str):
            pass

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return torch.full((i + 1,), i), torch.full((i + 1,), i)

    class Same(nn.Module):
        def __init__(self, num_classes: int, in_chans: int):
            super().__init__()
            self.scores = nn.Embedding.from_pretrained(9 * torch.eye(num_classes), freeze=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x).transpose(1, 2)

    def padded(samples: list[Any]) -> Any:
        rows = [nn.functional.pad(x, (0, 4 - len(x))) for x, _ in samples]
        return torch.stack(rows), torch.stack(rows)

    isobatch.register("data", "some_lines", Lines)
    isobatch.register("model", "same", Same)
    isobatch.register("collate", "some_padded", padded)
    try:
        words = (*SHORT, "data=custom", "data.name=some_lines", "data.collate=some_padded", "model=custom", "model.name=same")
        train(tmp_path / "run", *words)
        train(tmp_path / "out", *words, "task=predict", f"resume={tmp_path / 'run'}")
    finally:
        del data.TABLE["some_lines"], model.TABLE["same"], COLLATES["some_padded"]
    assert (tmp_path / "out/predictions.csv").read_text().split("\n")[1:5] == [
        "0,0,0 0 0 0", "1,1,1 1 0 0", "2,2,2 2 2 0", "3,3,3 3 3 3"]  # fmt: skip
