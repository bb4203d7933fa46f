"""Options that good recipes are made of: each has its effect, and together they train the same on one process and on two."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import BASE, rows, summary, train, train_ranks

import isobatch
from isobatch.errors import ConfigError

WORDS = ("logger=none", "threads=1", "reduction=exact", "data=synthetic", "data.samples=20", "data.eval_samples=8",
         "data.image_size=16", "data.num_classes=4", "model=timm", "model.arch=test_convnext", "+model.kwargs.patch_size=1",
         "epochs=null", "steps=3", "log_every=1", "eval_every=3", "batch.effective=8", "batch.micro=2", "batch.shard=null",
         "optimizer.lr=0.01", "batch.eval=8")  # fmt: skip
CHANGES = {
    "label_smoothing": ("loss.label_smoothing=0.1",),
    "bce": ("loss=bce", "loss.target_threshold=0.2", "augment=mixup"),
    "jsd": ("loss=jsd",),
    "drop_path": ("model.drop_path_rate=0.3",),
    "layer_decay": ("optimizer.layer_decay=0.7",),
    "max_grad_norm": ("max_grad_norm=0.1",),
}
TOGETHER = ("loss.label_smoothing=0.1", "model.drop_path_rate=0.3", "optimizer.layer_decay=0.7", "ema=ema", "ema.warmup=true",
            "model.grad_checkpointing=true", "channels_last=true", "augment=three", "max_grad_norm=1.0")  # fmt: skip


SMALL = (*(word for word in WORDS if "model" not in word), "model=linear")
ONCE = ("steps=1", "eval_every=1")


def digest(folder: Path, *words: str) -> str:
    train(folder, *WORDS, *words)
    return summary(folder)["weights_sha256"]


def test_each_changes_what_is_trained_and_what_only_saves_memory_does_not(tmp_path: Path) -> None:
    found = {name: digest(tmp_path / name, *ONCE, *words) for name, words in CHANGES.items()}
    found["plain"] = digest(tmp_path / "plain", *ONCE)
    assert len(set(found.values())) == len(found), found
    assert digest(tmp_path / "checkpointing", *ONCE, "model.grad_checkpointing=true") == found["plain"]
    # an average does not touch the training; its warmup forgets the first weights, so it evaluates otherwise
    losses = []
    for warmup in ("true", "false"):
        assert digest(tmp_path / warmup, *ONCE, "ema=ema", "ema.decay=0.99", f"ema.warmup={warmup}") == found["plain"]
        losses.append(summary(tmp_path / warmup)["final"]["eval/loss"])
    assert len({*losses, summary(tmp_path / "plain")["final"]["eval/loss"]}) == 3


@pytest.mark.parametrize("words", [
    pytest.param(TOGETHER, id="together"),
    *(pytest.param(CHANGES[name], id=name, marks=pytest.mark.slow) for name in ("bce", "jsd")),
])  # fmt: skip
def test_one_process_and_two_train_the_same(words: tuple[str, ...], tmp_path: Path) -> None:
    one = digest(tmp_path / "one", *words)
    train_ranks(2, tmp_path / "two", *WORDS, *words)
    assert summary(tmp_path / "two")["weights_sha256"] == one
    assert rows(tmp_path / "two", "train/loss") == rows(tmp_path / "one", "train/loss")
    assert summary(tmp_path / "two")["final"]["eval/loss"] == summary(tmp_path / "one")["final"]["eval/loss"]


def test_evaluations_and_checkpoints_by_epochs_and_shares_of_the_run(tmp_path: Path) -> None:
    """4 epochs of 3 steps: every half epoch rounds to 2 steps, a quarter of the run is 3."""
    for every, saves, expected, kept in (("0.5ep", "2ep", [2, 4, 6, 8, 10, 12], [6, 12]), ("25%", "0.1", [3, 6, 9, 12],
                                         list(range(1, 13)))):  # fmt: skip
        folder = tmp_path / every
        train(folder, *SMALL, "steps=null", "epochs=4", f"eval_every={every}", f"checkpoint.every={saves}",
              "checkpoint=default", "checkpoint.keep=20", "checkpoint.best=null")  # fmt: skip
        evaluated = [row["step"] for row in isobatch.read(folder) if "eval/loss" in row]
        assert evaluated == expected, every
        assert sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")) == kept
    for word, way in (("eval_every=0ep", "must be positive"), ("checkpoint.every=0", "must be positive"),
                      ("eval_every=often", "is no length of a run")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{word}: {way}; set .* epochs"):
            train(tmp_path / "refused", *SMALL, word)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_compiled_model_trains_alike_on_one_process_and_on_two(tmp_path: Path) -> None:
    """Full windows, a short one at the end of the epoch and evaluations: three shapes, three graphs."""
    words = (*BASE, "epochs=1", "batch.effective=400", "batch.micro=200", "log_every=1", "optimizer=sgd")
    train(tmp_path / "plain", *words)
    train(tmp_path / "one", *words, "compile=default")
    train_ranks(2, tmp_path / "two", *words, "compile=true")
    for name in ("one", "two"):
        assert rows(tmp_path / name, "train/loss") == pytest.approx(rows(tmp_path / "plain", "train/loss"), rel=1e-5)
        assert rows(tmp_path / name, "eval/loss") == pytest.approx(rows(tmp_path / "plain", "eval/loss"), rel=1e-5)
