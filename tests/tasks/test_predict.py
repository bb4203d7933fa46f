"""`task=predict`: every sample once, in order, the same file at any number of ranks; from a run, a file or timm's weights."""

from __future__ import annotations

import csv
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import BASE, on_ranks, plain, train
from PIL import Image

import isobatch
from isobatch import checkpoint, writer
from isobatch.config import load
from isobatch.data import unlabelled
from isobatch.errors import ConfigError
from isobatch.resume import rebuild

PHOTOS = ("logger=none", "threads=1", "model=timm", "model.arch=test_resnet", "data=image_folder", "data.image_size=16",
          "data.crop_pct=1.0", "data.num_workers=0", "batch.effective=8", "batch.shard=4", "epochs=null", "steps=2",
          "scheduler=constant")  # fmt: skip


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three colours as classes, and folders, a csv and a tar of the same images without labels."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 8), ("val", 3)):
        for colour in ("blue", "green", "red"):
            (root / split / colour).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (20, 18), colour).save(root / split / colour / f"{i}.png")
    new = root / "new"
    (new / "deeper").mkdir(parents=True)
    names = ["b.png", "deeper/c.png", "a.jpg", "deeper/d.png", "e.png", "f.png", "g.png"]
    for i, name in enumerate(names):
        Image.new("RGB", (30 + i, 24), ("red", "green", "blue")[i % 3]).save(new / name)
    (new / "notes.txt").write_text("no image")
    with (root / "new/list.csv").open("w") as file:
        file.write("path,weight\n" + "".join(f"{name},{i}\n" for i, name in enumerate(names)))
    with tarfile.open(root / "new.tar", "w") as tar:
        for name in names:
            tar.add(new / name, name)
    return root


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder, *PHOTOS, f"data.root={photos}")
    return folder


def predicted(folder: Path, run: Path, *words: str, **more: Any) -> list[dict[str, str]]:
    train(folder, f"resume={run}", "logger=none", "task=predict", *words, **more)
    return table(folder)


def test_a_folder_a_csv_and_a_tar_give_the_same_rows_by_name(run: Path, photos: Path, tmp_path: Path) -> None:
    rows = predicted(tmp_path / "folder", run, f"predict.path={photos / 'new'}", "predict.top=2")
    assert [row["name"] for row in rows] == ["a.jpg", "b.png", "deeper/c.png", "deeper/d.png", "e.png", "f.png", "g.png"]
    assert [row["index"] for row in rows] == [str(i) for i in range(7)]
    assert list(rows[0]) == ["index", "name", "prediction", "probability", "prediction_2", "probability_2"]
    assert {row["prediction"] for row in rows} <= {"blue", "green", "red"}
    assert all(float(row["probability"]) >= float(row["probability_2"]) > 0 for row in rows)
    by_name = {row["name"]: {k: v for k, v in row.items() if k != "index"} for row in rows}
    for i, path in enumerate((photos / "new/list.csv", photos / "new.tar", photos / "new/a.jpg")):
        others = predicted(tmp_path / str(i), run, f"predict.path={path}", "predict.top=2", "batch.eval=7")
        assert len(others) == (1 if path.suffix == ".jpg" else 7)
        for row in others:
            assert {k: v for k, v in row.items() if k not in ("index", "probability", "probability_2")} == {
                k: v for k, v in by_name[row["name"]].items() if k not in ("probability", "probability_2")}  # fmt: skip
            assert float(row["probability"]) == pytest.approx(float(by_name[row["name"]]["probability"]), abs=1e-5)
    written = json.loads((tmp_path / "folder/summary.json").read_text())
    assert written["state"] == "completed" and written["samples"] == 7
    # what the model says is what it says by hand, of the pixels as in the evaluation
    trained = rebuild.of_run(checkpoint.read(run), load(plain(*PHOTOS)).checkpoint)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (trained.info.mean, trained.info.std))
    for row in rows:
        with Image.open(photos / "new" / row["name"]) as image:
            side, (width, height) = min(image.size), image.size
            left, top = (width - side) // 2, (height - side) // 2
            crop = image.convert("RGB").crop((left, top, left + side, top + side))
        pixels = torch.tensor(list(crop.resize((16, 16)).tobytes())).view(16, 16, 3).permute(2, 0, 1) / 255
        said = trained.network(((pixels - mean) / std).unsqueeze(0)).softmax(1)[0]
        assert float(row["probability"]) == pytest.approx(float(said.max()), abs=2e-4)
        assert row["prediction"] == ("blue", "green", "red")[int(said.argmax())]


def test_the_file_is_the_same_at_any_number_of_ranks(run: Path, photos: Path, tmp_path: Path) -> None:
    words = ("task=predict", f"resume={run}", "logger=none", f"predict.path={photos / 'new'}", "batch.eval=2")
    train(tmp_path / "1", *words)
    on_ranks(3, tmp_path / "3", lambda ranks: train(tmp_path / "3", *words, "parallel=ddp", ranks=ranks).result)
    first = (tmp_path / "1/predictions.csv").read_bytes()
    assert first.count(b"\n") == 8 and (tmp_path / "3/predictions.csv").read_bytes() == first


def test_parquet_holds_the_same_rows(run: Path, photos: Path, tmp_path: Path, monkeypatch) -> None:
    import pyarrow.parquet

    words = (f"predict.path={photos / 'new'}", "batch.eval=3")
    rows = predicted(tmp_path / "csv", run, *words)
    train(tmp_path / "parquet", f"resume={run}", "logger=none", "task=predict", "writer=parquet", *words)
    found = pyarrow.parquet.read_table(tmp_path / "parquet/predictions.parquet").to_pylist()
    assert [(row["index"], row["name"], row["prediction_3"]) for row in found] == [
        (int(row["index"]), row["name"], row["prediction_3"]) for row in rows]  # fmt: skip
    assert [row["probability"] for row in found] == pytest.approx([float(row["probability"]) for row in rows], abs=1e-6)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(writer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^writer=parquet: the package pyarrow is not installed; pip install"):
        writer.Parquet().check()


def test_own_data_without_labels_and_an_own_writer(tmp_path: Path, monkeypatch) -> None:
    own = ModuleType("predict_parts")

    class Rows:
        def __init__(self, count: int, bare: bool):
            self.count, self.bare, self.classes = count, bare, ["low", "high"]

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, i: int) -> Any:
            row = torch.full((3,), i / self.count - 0.5)
            return row if self.bare else (row, int(i >= self.count / 2))

        def describe(self, i: int) -> str:
            return f"row {i}"

    seen: list[Any] = []

    class Keeps:
        def __init__(self, folder: Path, about: writer.About, shout: bool = False):
            self.folder, self.about, self.shout = folder, about, shout

        def write(self, answered: writer.Answered) -> None:
            seen.extend(zip(answered.names, answered.outputs.argmax(1).tolist(), strict=True))

        def close(self) -> None:
            seen.append(("closed", self.about.samples, self.shout))

    isobatch.register("data", "bare_rows", lambda split: Rows(10 if split == "predict" else 16, split == "predict"))
    isobatch.register("writer", "keeps", Keeps)
    monkeypatch.setitem(sys.modules, "predict_parts", own)
    words = (*BASE, "data=custom", "data.name=bare_rows", "data.num_workers=0")
    train(tmp_path / "run", *words, "epochs=2", "batch.effective=8")
    chosen = ("writer=custom", "writer.name=keeps", "+writer.kwargs.shout=true")
    train(tmp_path / "out", f"resume={tmp_path / 'run'}", *words, "task=predict", *chosen, "batch.eval=4")
    assert [name for name, *_ in seen[:-1]] == [f"row {i}" for i in range(10)] and seen[-1] == ("closed", 10, True)
    train(tmp_path / "csv", f"resume={tmp_path / 'run'}", *words, "task=predict")
    assert [row["prediction"] for row in table(tmp_path / "csv")] == [["low", "high"][k] for _, k in seen[:-1]]


def test_the_evaluation_samples_where_no_path_is_named(tmp_path: Path) -> None:
    """Of data in memory too; and their answers are those of task=evaluate."""
    words = (*BASE, "epochs=null", "steps=3", "batch.eval=50")
    train(tmp_path / "run", *words)
    train(tmp_path / "evaluated", *words, f"resume={tmp_path / 'run'}", "task=evaluate")
    rows = predicted(tmp_path / "out", tmp_path / "run", *words)
    evaluated = table(tmp_path / "evaluated")
    assert [(r["index"], r["prediction"], r["probability"]) for r in rows] == [
        (r["index"], r["prediction"], r["probability"]) for r in evaluated]  # fmt: skip
    numbers = (*BASE, "epochs=null", "steps=1", "data=random_matrix", "loss=mse")
    train(tmp_path / "numbers", *numbers)
    with pytest.raises(ConfigError, match=r"^predict\.path=.*: the weights \(.*\) were not trained on images of files"):
        predicted(tmp_path / "no", tmp_path / "numbers", f"predict.path={tmp_path}")
    assert list(predicted(tmp_path / "rows", tmp_path / "numbers")[0]) == ["index", "name", "output"]


def test_timms_weights_and_a_file_of_weights(photos: Path, run: Path, tmp_path: Path) -> None:
    from isobatch.runtime.timm_import import timm

    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "w.pth")
    overlay = ("{file: " + str(tmp_path / "w.pth") + ", num_classes: 3, mean: [0.5, 0.4, 0.3], std: [0.2, 0.2, 0.2], "
               "input_size: [3, 16, 16], test_input_size: [3, 24, 24], crop_pct: 0.9, test_crop_pct: 1.0, "
               "label_names: [ape, bee, cat]}")  # fmt: skip
    words = ("task=predict", "logger=none", "model=timm", "model.arch=test_resnet", f"predict.path={photos / 'new'}")
    train(tmp_path / "timm", *words, "model.pretrained=true", f"+model.kwargs.pretrained_cfg_overlay={overlay}")
    rows = table(tmp_path / "timm")
    assert {row["prediction"] for row in rows} <= {"ape", "bee", "cat"} and len(rows) == 7
    train(tmp_path / "file", *words, f"model.checkpoint_path={run / 'checkpoints/last/model.safetensors'}")
    trained = predicted(tmp_path / "run", run, f"predict.path={photos / 'new'}", "checkpoint.load=last")
    assert table(tmp_path / "file") == trained  # the file says what its run knew of images and classes
    train(tmp_path / "bare", *words, f"model.checkpoint_path={tmp_path / 'w.pth'}")
    assert {row["prediction"] for row in table(tmp_path / "bare")} <= {"0", "1", "2"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), r"^resume=null: task=predict needs a run to predict, or trained weights; set resume="),
        (("predict.path=/nowhere", "resume=x"), r"^predict\.path=/nowhere: no such file or folder"),
        (("predict.top=0",), r"^predict\.top=0"),
    ],
)
def test_refusals(words: tuple[str, ...], line: str) -> None:
    from isobatch import tasks

    with pytest.raises(ConfigError, match=line):
        tasks.of(load({**plain("task=predict", *(w for w in words if not w.startswith("resume="))),
                       **({"resume": "x"} if "resume=x" in words else {})}))  # fmt: skip


def test_lists_that_name_no_image(photos: Path, tmp_path: Path) -> None:
    from isobatch.data import DataInfo
    from isobatch.data.images import ImageOptions

    known = DataInfo("x", (3, 8, 8), 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.csv").write_text("file\na.png\n")
    (tmp_path / "gone.csv").write_text("path\na.png\n")
    (tmp_path / "text.md").write_text("")
    for name, line in (("empty", "holds no image"), ("odd.csv", r"^predict\.column=path: .* has the columns file"),
                       ("gone.csv", "lists a.png, which is not there"),
                       ("text.md", "is no folder, csv, tar or image")):  # fmt: skip
        with pytest.raises(ConfigError, match=line):
            unlabelled.load(str(tmp_path / name), ImageOptions(image_size=8), known, "path")
