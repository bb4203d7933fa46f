"""`model.freeze` on every plan, first weights from files, and the stem for small images."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from harness import plain, summary, train, train_ranks
from torch import nn

from isobatch import checkpoint
from isobatch.config import load, options
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.model import freezing
from isobatch.optimizer import TimmOptimizer
from isobatch.train.batch_norm import learns

IMAGES = DataInfo("images", (3, 32, 32), 10)
SHORT = ("logger=none", "threads=1", "data=synthetic", "data.samples=64", "data.eval_samples=16", "data.image_size=16",
         "model=timm", "model.arch=test_resnet", "epochs=null", "steps=3", "batch.effective=16", "batch.micro=4",
         "batch.shard=null",
         "optimizer=sgd", "optimizer.lr=0.05", "scheduler=constant", "ema=ema", "ema.decay=0.5", "ema.warmup=true")  # fmt: skip
PROBE = (*SHORT, "model.freeze=[backbone]")


def weights(run: Path, section: str = "model") -> dict[str, torch.Tensor]:
    return checkpoint.load(run)[section]


def changed(run: Path, start: dict[str, torch.Tensor], section: str = "model") -> set[str]:
    return {name for name, tensor in weights(run, section).items() if not torch.equal(tensor, start[name])}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that every run here begins with: of a run whose learning rate is 0, statistics left as they are."""
    folder = tmp_path_factory.mktemp("start")
    train(folder, *SHORT, "steps=1", "optimizer.lr=0", "model.batch_norm=frozen")
    return weights(folder)


def test_linear_probing_trains_the_classifier_and_nothing_else(tmp_path: Path, start: dict[str, torch.Tensor]) -> None:
    train(tmp_path / "a", *PROBE)
    assert changed(tmp_path / "a", start) == changed(tmp_path / "a", start, "ema") == {"fc.weight", "fc.bias"}
    assert len(checkpoint.load(tmp_path / "a")["optimizer"]["state"]) == 2
    train(tmp_path / "b", *SHORT)
    assert {"bn1.weight", "bn1.running_mean", "bn1.num_batches_tracked"} <= changed(tmp_path / "b", start)


@pytest.mark.parametrize("more", [
    *(pytest.param(words, marks=pytest.mark.slow)
      for words in ((), ("reduction=exact",), ("precision=O2", "data.image_size=48"))),
    ("reduction=exact", "optimizer=adamw", "channels_last=true"),
])  # fmt: skip
def test_frozen_parts_stay_so_on_two_processes(tmp_path: Path, start: dict[str, torch.Tensor], more: tuple[str, ...]) -> None:
    part = ("model.freeze=[conv1,bn1,'layer[12]']", *more)
    train_ranks(2, tmp_path / "two", *SHORT, *part)
    moved = changed(tmp_path / "two", start)
    assert moved and not [name for name in moved if name.startswith(("conv1", "bn1", "layer1", "layer2"))]
    assert {"layer3.0.bn1.running_mean", "fc.weight"} <= moved
    if "reduction=exact" in more:
        train(tmp_path / "one", *SHORT, *part)
        assert summary(tmp_path / "one")["weights_sha256"] == summary(tmp_path / "two")["weights_sha256"]


@pytest.mark.parametrize(("arch", "head"), [("test_vit", "head."), ("test_resnet", "fc."), ("test_efficientnet", "classifier."),
                                            ("test_convnext", "head.fc.")])  # fmt: skip
def test_the_backbone_is_all_but_the_classifier(arch: str, head: str) -> None:
    model = options("model", {"name": "timm", "arch": arch}).build(IMAGES)
    freezing.freeze(model, ["backbone"])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(name.startswith(head) for name in trained)
    model.train()
    assert not learns(model)
    small = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert freezing.describe(model).startswith(f"{small:,} of ")
    groups = TimmOptimizer(opt="adamw", lr=1.0, layer_decay=0.5).build(model, 8).param_groups
    assert sum(p.numel() for group in groups for p in group["params"]) == small and max(g["lr"] for g in groups) == 1.0


def test_a_classifier_begins_as_it_is_asked_to() -> None:
    made = {}
    for name, given in (("plain", {}), ("scaled", {"head_init_scale": 0.5, "head_init_bias": -2.0})):
        torch.manual_seed(0)
        made[name] = options("model", {"name": "timm", "arch": "test_vit", **given}).build(IMAGES).state_dict()
    assert made["scaled"].pop("head.bias").unique().tolist() == [-2.0]
    assert made["scaled"].pop("head.weight").equal(made["plain"]["head.weight"] * 0.5)
    assert all(value.equal(made["plain"][name]) for name, value in made["scaled"].items())


def test_patterns_and_their_refusal() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))
    freezing.freeze(model, ["backbone"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["2.weight", "2.bias"]
    assert not learns(model.train())
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    freezing.freeze(model, ["*.weight"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.bias", "1.bias"]
    assert learns(model)  # its statistics were not meant
    with pytest.raises(ConfigError, match=r"^model\.freeze=layer9: names no parameter .*backbone, 0, 1"):
        freezing.freeze(model, ["0", "layer9"])


def test_frozen_batch_norm_may_have_shards_of_one_sample(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard of one sample"):
        train(tmp_path / "a", *SHORT, "batch.micro=1", "batch.shard=null")
    train(tmp_path / "b", *PROBE, "batch.micro=1", "batch.shard=null", "steps=1")


def test_first_weights_from_a_run_a_file_and_for_other_classes(tmp_path: Path) -> None:
    train(tmp_path / "run", *SHORT, "steps=2")
    saved = weights(tmp_path / "run", "ema")  # what model.safetensors holds
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/last/model.safetensors"):
        node = {"name": "timm", "arch": "test_resnet", "checkpoint_path": str(path)}
        model = options("model", node).build(IMAGES)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    other = options("model", node).build(DataInfo("images", (3, 32, 32), 4)).state_dict()
    assert other["fc.weight"].shape[0] == 4
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.items() if not name.startswith("fc."))
    for wrong, says in (({"arch": "test_vit"}, "lacks"), ({"checkpoint_path": str(tmp_path)}, "neither a file")):
        with pytest.raises(ConfigError, match=rf"^model\.checkpoint_path=.*{says}"):
            options("model", {**node, **wrong}).build(IMAGES)
    with pytest.raises(ConfigError, match=r"^model\.checkpoint_path=.*has conv1\.0\.weight as \[.*here it is \["):
        options("model", node).build(DataInfo("images", (1, 32, 32), 10))
    (tmp_path / "bad.pth").write_bytes(b"\x80\x04cposix\nsystem\n.")
    with pytest.raises(ConfigError, match="safe mode"):
        options("model", {**node, "checkpoint_path": str(tmp_path / "bad.pth")}).build(IMAGES)


def test_a_stem_for_small_images() -> None:
    model = options("model", {"name": "timm", "arch": "resnet18", "small_stem": True}).build(IMAGES).eval()
    assert model.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)  # type: ignore[operator]
    assert timm.create_model("resnet18").eval().forward_features(torch.zeros(1, 3, 32, 32)).shape[-1] == 1
    with pytest.raises(ConfigError, match=r"^model\.small_stem=True: test_vit has no first"):
        options("model", {"name": "timm", "arch": "test_vit", "small_stem": True}).build(IMAGES)


def test_compile_takes_torchs_modes() -> None:
    assert load(plain("compile=reduce-overhead")).compile == "reduce-overhead"
    assert load(plain("compile=true")).compile is True
    with pytest.raises(ConfigError, match=r"^compile=fast"):
        load(plain("compile=fast"))
