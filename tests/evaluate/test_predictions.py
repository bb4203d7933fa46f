"""`task=evaluate`: what it writes adds up, is the same at any number of ranks, and comes from the weights asked for."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BASE, on_ranks, summary, train
from PIL import Image

from isobatch import evaluate
from isobatch.errors import ConfigError
from isobatch.evaluate import Answers, Confusion

FILES = ("predictions.csv", "per_class.csv", "confusion.csv")
SHORT = (*BASE, "epochs=null", "steps=20", "batch.effective=32", "batch.micro=7", "batch.shard=null")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder, *SHORT, "ema=ema", "ema.decay=0.97", "eval_every=10", "checkpoint.every=10", "checkpoint.keep=3")
    return folder


def evaluated(run: Path, folder: Path, *words: str) -> dict[str, Any]:
    train(folder, *SHORT, "ema=ema", "ema.decay=0.97", "task=evaluate", f"resume={run}", *words)
    return json.loads((folder / "evaluation.json").read_text())


def test_files_add_up_and_are_the_same_at_any_number_of_ranks(run: Path, tmp_path: Path, matrix_drawn: None,
                                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    result = evaluated(run, tmp_path / "1")["result"]
    said = capsys.readouterr().out
    assert "  parallel" in said and not any(word in said for word in ("  length", "  batch", "reduction", "micro")), said
    rows = table(tmp_path / "1/predictions.csv")
    assert [int(row["index"]) for row in rows] == list(range(len(rows))) and len(rows) == result["eval/samples"] == 359
    right = [row["label"] == row["prediction"] for row in rows]
    assert [row["correct"] == "1" for row in rows] == right
    assert sum(right) / len(rows) == result["eval/accuracy"] == summary(run)["final"]["eval/accuracy"]
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)  # the most probable of ten
    classes = table(tmp_path / "1/per_class.csv")
    for entry in classes:
        mine = [row for row in rows if row["label"] == entry["name"]]
        assert int(entry["samples"]) == len(mine)
        assert float(entry["recall"]) == sum(row["correct"] == "1" for row in mine) / len(mine)
    matrix = table(tmp_path / "1/confusion.csv")
    for line in matrix:
        for name in [c["name"] for c in classes]:
            assert int(line[name]) == sum(r["label"] == line["label"] and r["prediction"] == name for r in rows)
    assert (tmp_path / "1/confusion.png").read_bytes().startswith(b"\x89PNG")
    final = summary(tmp_path / "1")["final"]
    assert final["eval/balanced_accuracy"] == pytest.approx(sum(float(c["recall"]) for c in classes) / 10)
    words = (*SHORT, "ema=ema", "ema.decay=0.97", "task=evaluate", "parallel=ddp", f"resume={run}")
    on_ranks(3, tmp_path / "3", lambda ranks: train(tmp_path / "3", *words, ranks=ranks))
    for name in FILES:
        assert (tmp_path / "3" / name).read_bytes() == (tmp_path / "1" / name).read_bytes(), name


def test_which_checkpoint_and_which_of_its_weights(run: Path, tmp_path: Path) -> None:
    found = {}
    for words in (("raw", "last"), ("ema", "last"), ("ema", "step-10"), ("auto", "best")):
        chosen = f"checkpoint.weights={words[0]}", f"checkpoint.load={words[1]}"
        found[words] = evaluated(run, tmp_path / "-".join(words), *chosen)
    assert [found[w]["weights"] for w in found][:3] == ["raw", "ema", "ema"]
    best = max(summary(run)["best"][f"eval/{kind}accuracy"] for kind in ("", "raw_"))  # the better of the two
    assert found["auto", "best"]["result"]["eval/accuracy"] == best
    assert [found[w]["step"] for w in found][:3] == [20, 20, 10]
    losses = [found[w]["result"]["eval/loss"] for w in found]
    assert losses[1] == summary(run)["final"]["eval/loss"] and len(set(losses[:3])) == 3
    train(tmp_path / "bare", *SHORT)
    with pytest.raises(ConfigError, match=r"^checkpoint\.weights=ema: .* holds no average"):
        train(tmp_path / "no", *SHORT, "ema=ema", "task=evaluate", f"resume={tmp_path / 'bare'}", "checkpoint.weights=ema")
    # an average that would start at the weights is none: they are evaluated as what they are
    train(tmp_path / "auto", *SHORT, "ema=ema", "task=evaluate", f"resume={tmp_path / 'bare'}")
    assert json.loads((tmp_path / "auto/evaluation.json").read_text())["weights"] == "raw"


def test_training_evaluates_without_any_of_it_and_data_without_classes_has_none(run: Path, tmp_path: Path) -> None:
    assert not [name for name in (*FILES, "confusion.png", "evaluation.json") if (run / name).exists()]
    words = ("logger=none", "threads=1", "data=random_matrix", "model=linear", "loss=output_sum", "epochs=1")
    train(tmp_path / "a", *words)
    train(tmp_path / "b", *words, "task=evaluate", f"resume={tmp_path / 'a'}")
    assert summary(tmp_path / "b")["final"]["eval/loss"] == summary(tmp_path / "a")["final"]["eval/loss"]
    assert not (tmp_path / "b/predictions.csv").exists()


def test_files_of_images_are_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number, label in enumerate(("cat", "dog, small")):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (40, 40), (80 * i, 90 * number, 20)).save(tmp_path / "photos" / split / label / f"{i}.png")
    words = (*BASE, "data=image_folder", f"data.root={tmp_path / 'photos'}", "data.image_size=8", "data.num_workers=0",
             "batch.effective=6", "epochs=1")  # fmt: skip
    train(tmp_path / "a", *words)
    train(tmp_path / "b", *words, "task=evaluate", f"resume={tmp_path / 'a'}")
    rows = table(tmp_path / "b/predictions.csv")
    assert [Path(row["file"]).relative_to(tmp_path / "photos").as_posix() for row in rows] == [
        f"val/{label}/{i}.png" for label in ("cat", "dog, small") for i in range(3)]  # fmt: skip
    assert {row["label"] for row in rows} == {"cat", "dog, small"}


def test_many_classes_few_samples_and_names_of_any_script(tmp_path: Path, matrix_drawn: None) -> None:
    """Classes that do not occur have no recall and leave the means alone; a matrix of thousands is not drawn."""
    answers = Answers(4, torch.device("cpu"))
    logits = torch.eye(3)[[0, 1, 1, 1]] * 5
    answers.take(0, logits, logits.argmax(1), torch.tensor([0, 1, 1, 0]))
    classes = Confusion(answers.counts(3), ["\u732b", "$x_1$", "c"])
    assert [row["recall"] for row in classes.rows()] == [0.5, 1.0, None]
    assert [row["precision"] for row in classes.rows()] == [1.0, 2 / 3, None]
    assert classes.means()["eval/balanced_accuracy"] == 0.75
    assert classes.confused() == [{"label": "\u732b", "prediction": "$x_1$", "count": 1, "share": 0.5}]
    written = evaluate.write(tmp_path, answers, classes, None, {})
    assert [path.name for path in written][-1] == "confusion.png" and written[-1].stat().st_size > 1000
    many = Confusion(answers.counts(1500), [])
    assert [p.name for p in evaluate.write(tmp_path, answers, many, None, {})] == [
        "evaluation.json", "predictions.csv", "per_class.csv"]  # fmt: skip


def test_loggers_get_the_matrix_and_the_table(run: Path, tmp_path: Path, matrix_drawn: None) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    evaluated(run, tmp_path, "logger=tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "confusion" in events.Tags()["images"]
    assert any(tag.startswith("per_class") for tag in events.Tags()["tensors"])


def test_what_goes_on_from_a_checkpoint_fetches_no_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    words = ("logger=none", "threads=1", "data=synthetic", "data.samples=16", "data.eval_samples=8", "data.image_size=16",
             "model=timm", "model.arch=test_resnet", "batch.effective=8", "epochs=null", "scheduler=constant")  # fmt: skip
    train(tmp_path / "run", *words, "steps=1")
    made, create = [], timm.create_model

    def creates(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs.get("pretrained"))
        return create(*args, **{**kwargs, "pretrained": False})

    monkeypatch.setattr(timm, "create_model", creates)
    elsewhere = ("model.pretrained=true", f"model.checkpoint_path={tmp_path / 'gone.pth'}", f"resume={tmp_path / 'run'}")
    train(tmp_path / "evaluated", *words, *elsewhere, "task=evaluate", "steps=1")
    train(tmp_path / "longer", *words, *elsewhere, "steps=2")
    assert made == [False, False] and summary(tmp_path / "longer")["steps"] == 2
