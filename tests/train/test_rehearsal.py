"""What cannot work is one line before the first step, with sample and key; and the two forwards leave no trace."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train, train_ranks
from PIL import Image
from precision_probes import QUIET, data_of, model_of
from torch import Tensor, nn

import isobatch
from isobatch.errors import ConfigError, JobFailed, Stopped
from isobatch.launch.signals import STOP
from isobatch.runtime import waiting
from isobatch.train import rehearsal

IMAGES, LABELS = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
WORDS = (*QUIET, "steps=2", "eval_every=2", "batch.effective=4", "batch.micro=2", "batch.shard=null")


class Odd(nn.Module):
    def __init__(self, answer: Any):
        super().__init__()
        self.layer, self.answer = nn.Linear(64, 4), answer

    def forward(self, inputs: Tensor) -> Any:
        return self.answer(self.layer(inputs.flatten(1)))


def refused(folder: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        train(folder, *words)
    assert not (folder / "metrics.jsonl").exists()
    return str(refusal.value)


@pytest.mark.parametrize(("name", "answer", "says"), [
    ("tuple", lambda out: (out, out), "a tuple of float32 [2, 4], float32 [2, 4], with targets int64 [2]"),
    ("dict", lambda out: {"logits": out}, "a dict of float32 [2, 4]"), ("none", lambda out: None, "a NoneType"),
    ("few", lambda out: out[:, :2], "float32 [2, 2], with targets int64 [2], as of sample 0"),
])  # fmt: skip
def test_an_output_that_the_loss_cannot_take(tmp_path: Path, name: str, answer: Any, says: str) -> None:
    labels = LABELS + (name == "few") * (LABELS == 0) * 3  # so that the first two are among those that two outputs lack
    text = refused(tmp_path, *WORDS, *data_of(f"eight_{name}", IMAGES, labels, 4),
                   *model_of(f"odd_{name}", lambda info: Odd(answer)))  # fmt: skip
    assert text.startswith("loss.name=") and says in text


class Returns:
    """Four samples of 4 classes, each what `sample` gives."""

    num_classes = 4

    def __init__(self, sample: Any):
        self.sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.sample(index)


ZERO = torch.zeros(1, 8, 8)


@pytest.mark.parametrize(("name", "sample", "says"), [
    ("bool", lambda i: (ZERO.bool(), i), "inputs, bool [2, 1, 8, 8], as of sample 0"),
    ("float64", lambda i: (ZERO.numpy().astype("float64"), i), "let the dataset return float32 (images: uint8)"),
    ("dict", lambda i: ({"a": ZERO}, i),
     "the model cannot take the training's inputs, a dict of float32 [2, 1, 8, 8], as of sample 0"),
    ("sizes", lambda i: (torch.zeros(1, 8, 8 + i), i), "the input of sample 1 is float32 [1, 8, 9], and that of sample 0 is"),
    ("text", lambda i: (ZERO, "cat"), "with targets a list of a str, a str, as of sample 0"),
    ("one", lambda i: (ZERO, torch.tensor([i])), "loss.name=cross_entropy: the training's loss cannot take the model's output"),
    ("int32", lambda i: (ZERO, torch.tensor(i, dtype=torch.int32)), "with targets int32 [2], as of sample 0"),
    ("from1", lambda i: (ZERO, i + 1), "sample 3 has the label 4, and the classes are 0 to 3: number them from 0"),
    ("minus", lambda i: (ZERO, -1), "sample 0 has the label -1, and the classes are 0 to 3"),
    ("sparse", lambda i: (ZERO.to_sparse(), i), "the training split's inputs cannot be brought to the device"),
])  # fmt: skip
def test_samples_that_cannot_be_trained_on(tmp_path: Path, name: str, sample: Any, says: str) -> None:
    """Also those whose labels nobody can know before they are read."""
    isobatch.register("data", f"returns_{name}", lambda split: Returns(sample))
    with pytest.raises((ConfigError, JobFailed)) as refusal:
        train(tmp_path, *WORDS, "data=custom", f"data.name=returns_{name}", "data.num_workers=0", "model=mlp")
    assert says in str(refusal.value)


def test_an_output_without_a_gradient(tmp_path: Path) -> None:
    text = refused(tmp_path, *WORDS, *data_of("eight_cut", IMAGES, LABELS, 4),
                   *model_of("cut", lambda info: Odd(lambda out: out.detach())))  # fmt: skip
    assert text.startswith("model.name=cut: no trainable weight has a part in its output, float32 [2, 4]")


@pytest.mark.parametrize("asked", [False, True])
def test_what_never_comes_back_ends_with_the_limit_or_with_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    asked: bool) -> None:  # fmt: skip
    over, clock = threading.Event(), iter(range(10**9))
    late = False

    def sample(index: int) -> tuple[Any, Any]:
        nonlocal late
        if (tmp_path / "plan.json").exists() and not over.is_set():  # not when the data set is first looked at
            late = True
            STOP.requested = 15 if asked else 0
            over.wait(200)
        return ZERO, index

    monkeypatch.setattr(waiting, "monotonic", lambda: 1e3 * next(clock) * late)  # the hours pass while it hangs
    monkeypatch.setattr(waiting, "DEAF_S", 1e18)
    monkeypatch.setattr(rehearsal, "LIMIT_S", 1e18 if asked else 480.0)
    isobatch.register("data", f"hangs_{asked}", lambda split: Returns(sample))
    try:
        with pytest.raises(Stopped if asked else JobFailed) as ended:
            train(tmp_path, *WORDS, "data=custom", f"data.name=hangs_{asked}", "data.num_workers=0", "model=mlp")
    finally:
        STOP.requested = 0
        over.set()
    text = "stopped by SIGTERM" if asked else "reading sample 0 of the training split has not ended within 480 s, before the"
    assert text in str(ended.value)


def test_a_library_that_hears_no_signal_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    monkeypatch.setattr(waiting, "DEAF_S", 0.0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as a thread that never comes back from C
    try:
        assert waiting.limited(lambda: given_up.wait(200), 0.0, lambda: 0, 0.0, given_up.set)
        signal.sigtimedwait([signal.SIGALRM], 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_fsdp_rehearses_too(tmp_path: Path) -> None:
    """Before the weights are cut: after it a forward is a collective."""
    words = (*WORDS, *data_of("eight_fsdp", IMAGES, LABELS, 4),
             *model_of("tuple_fsdp", lambda info: Odd(lambda out: (out,))))  # fmt: skip
    with pytest.raises(AssertionError, match=r"loss\.name=cross_entropy: the training's loss cannot take the model's output"):
        train_ranks(2, tmp_path, *words, strategy="fsdp")


@pytest.mark.parametrize(("targets", "says"), [
    (LABELS.int(), "targets int32 [2]"), (LABELS.unsqueeze(1), "targets int64 [2, 1]"),
])  # fmt: skip
def test_targets_that_the_loss_cannot_take(tmp_path: Path, targets: Tensor, says: str) -> None:
    name = f"targets_{targets.ndim}"
    text = refused(tmp_path, *WORDS, *data_of(name, IMAGES, targets, 4), *model_of("plain4", lambda info: Odd(lambda out: out)))
    assert says in text


class OneBased:
    def __init__(self, split: str):
        self.targets = [1, 2, 3, 4] if split == "train" else [1, 2, 3, 3]
        self.num_classes = 4

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 8, 8), self.targets[index]

    def describe(self, index: int) -> str:
        return f"file{index}.dcm"


def test_a_label_outside_the_classes_is_named_with_its_sample(tmp_path: Path) -> None:
    isobatch.register("data", "one_based", OneBased)
    text = refused(tmp_path, *WORDS, "data=custom", "data.name=one_based", "data.num_workers=0", "model=mlp")
    assert "sample 3 (file3.dcm) of the training split has the label 4, and the classes are 0 to 3; number the classes" in text


def test_inputs_of_another_dtype(tmp_path: Path) -> None:
    text = refused(tmp_path, *WORDS, *data_of("doubles", IMAGES.double(), LABELS, 4), "model=mlp")
    assert "the model cannot take the training's inputs, float64 [2, 1, 8, 8], as of sample 0" in text


def test_an_evaluation_size_that_the_model_cannot_take(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            path = tmp_path / "data" / split / name / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (64, 64), (200 * label,) * 3).save(path)
    text = refused(tmp_path / "run", *QUIET, "steps=1", "batch.effective=2", "data=image_folder",
                   f"data.root={tmp_path / 'data'}", "+model.kwargs.dynamic_img_size=false",
                   "data.num_workers=0", "model=timm", "model.arch=test_vit", "+model.kwargs.img_size=32", "data.image_size=32",
                   "data.eval_size=64")  # fmt: skip
    assert text.startswith("data.eval_size=64: the model cannot take the evaluation's inputs, float32 [2, 3, 64, 64]")


class Noisy(Odd):
    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs + 0.1 * torch.randn_like(inputs))


def test_a_model_that_draws_in_evaluation_is_told_and_others_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "isobatch")
    data = data_of("eight", IMAGES, LABELS, 4)
    train(tmp_path / "a", *WORDS, *data, *model_of("noisy4", lambda info: Noisy(lambda out: out)))
    assert "the model draws random numbers in evaluation" in caplog.text
    caplog.clear()
    train(tmp_path / "b", *WORDS, *data, "model=mlp", "model.norm=true", "model.drop_rate=0.5")
    assert "draws random numbers" not in caplog.text


def test_it_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*WORDS, *data_of("eight", IMAGES, LABELS, 4), "model=mlp", "model.norm=true", "model.drop_rate=0.5")
    with_it = train(tmp_path / "a", *words)
    monkeypatch.setattr(rehearsal.Rehearsal, "run", lambda self, *rest: [])
    assert train(tmp_path / "b", *words).weights == with_it.weights
