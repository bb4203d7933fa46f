"""The recipes of conf/experiment: their commands compose, their numbers are those of their sources, and each of them trains.

What a recipe is for (ImageNet, CIFAR-10, pretrained weights) is not on this machine: here it trains a few steps on tiny images.
"""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from harness import plain, rows, summary, train
from PIL import Image

from isobatch import checkpoint
from isobatch.batch_plan import BatchPlan, resolve_batch
from isobatch.config import conf_folder, load
from isobatch.optimizer import TimmOptimizer
from isobatch.run import run_job
from isobatch.runtime.distributed import Ranks
from isobatch.scheduler import Schedule

RECIPES = sorted(path.stem for path in (conf_folder() / "experiment").glob("*.yaml"))
SWEEPS = {"batch_size", "equivalence", "memory", "second_article", "speed", "strategies"}  # what they compare is the sweep
LIKE_OTHERS = {
    "rsb_a1",
    "rsb_a2",
    "rsb_b",
    "rsb_c",
    "rsb_d",
    "focal",
    "class_weighted",
}  # made of parts that the rest is made of
WEIGHED = [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in RECIPES]
EXAMPLES = conf_folder().parent / "examples"
IMAGENET = 1_281_167
FEW = ("logger=none", "threads=1", "epochs=null", "steps=3", "log_every=1", "eval_every=3", "batch.effective=6",
       "batch.micro=3", "batch.shard=null")  # fmt: skip
SMALL_UNET = ("data.image_size=32", "model.kwargs.decoder_channels=[8,4]", "model.kwargs.encoder_depth=2")
# recipe -> what makes it small: (data, other settings)
SMALL = {
    "article": ("", ("steps=null", "epochs=1", "batch.effective=8", "batch.micro=4")),
    "article_pitfall": ("", ("steps=null", "epochs=1", "batch.effective=12", "batch.micro=4")),
    "digits": ("", ()),
    "regression": ("", ("model.width=8",)),
    **dict.fromkeys(("segmentation", "class_weighted", "focal"), ("pictures", SMALL_UNET)),
    "several_labels": ("pictures", ("model.kwargs.channels=[8,8,8,8]",)),
    "cifar10_resnet18": ("data=synthetic", ("data.samples=12", "data.eval_samples=6", "data.image_size=8",
                                           "+model.kwargs.channels=[8,8,8,8]")),
    "imagenet_resnet50": ("files", ("model.arch=test_resnet", "data.image_size=24", "data.eval_size=32")),
    **{f"rsb_{name}": ("files", ("model.arch=test_resnet", "data.image_size=24")) for name in ("a1", "a2", "b", "c", "d")},
    "imagenet_vit_small": ("files", ("model.arch=test_vit", "+model.kwargs.img_size=32", "data.image_size=32")),
    "finetune": ("files", ("model.arch=test_convnext", "model.pretrained=false", "data.image_size=32")),
    "distill": ("files", ("model.arch=test_resnet", "loss.teacher.arch=test_vit", "loss.teacher.pretrained=false",
                          "+loss.teacher.kwargs.img_size=32", "data.image_size=32")),
}  # fmt: skip


def commands(recipe: str) -> list[list[str]]:
    """The words after train.py of each command in the comments that a recipe begins with."""
    head = (conf_folder() / "experiment" / f"{recipe}.yaml").read_text().split("defaults:")[0]
    text = "\n".join(line.removeprefix("#") for line in head.splitlines()).replace("\\\n", " ")
    command = re.compile(r"\s+(CUDA\S+ )?(python|torchrun) .*train\.py ")
    lines = [line.split("  #")[0] for line in text.splitlines() if command.match(line)]
    return [shlex.split(line.split("train.py", 1)[1]) for line in lines]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "val"):
        for number, label in enumerate(("cat", "dog", "owl")):
            (root / split / label).mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (40, 48), (40 * i, 90 * number, 20)).save(root / split / label / f"{i}.jpg")
    return root


@pytest.mark.parametrize("recipe", WEIGHED)
def test_a_recipe_begins_with_commands_that_compose_and_what_to_expect(recipe: str) -> None:
    text = (conf_folder() / "experiment" / f"{recipe}.yaml").read_text()
    assert re.search(r"(?i)expected:|reaches|minute|seconds", text.split("defaults:")[0]), "nothing says what to expect"
    found = commands(recipe)
    assert found and all(any("experiment=" in word for word in words) for words in found)
    if recipe not in SWEEPS:
        for words in found:
            load(plain(*[word for word in words if word != "-m"]))


@pytest.mark.parametrize("recipe", [recipe for recipe in WEIGHED if recipe.values[0] not in SWEEPS])
def test_a_recipe_trains(recipe: str, tmp_path: Path, photos: Path) -> None:
    data, words = SMALL[recipe]
    if data == "pictures":
        runpy.run_path(str(EXAMPLES / "pictures" / "make.py"))["main"](tmp_path / "pictures", 12)
    roots = {"files": photos, "pictures": tmp_path / "pictures"}
    where = (f"data.root={roots[data]}", "data.num_workers=0") if data in roots else (data,) if data else ()
    run_job(plain(f"experiment={recipe}", *FEW, *where, *words), tmp_path, Ranks())
    done = summary(tmp_path)
    assert done["state"] == "completed" and done["steps"] >= 2 and "eval/loss" in done["final"]
    assert all(norm > 0 for norm in rows(tmp_path, "train/grad_norm"))


def updates(config) -> tuple[int, int]:
    """(micro steps of one replica, updates in all) on ImageNet."""
    batch = resolve_batch(config.batch.effective, config.batch.micro, None, 1)
    plan = BatchPlan(batch, config.sampler.order_size(IMAGENET), config.sampler.tail)
    return batch.accumulation_steps, config.epochs * plan.windows_per_epoch


def test_the_numbers_of_the_imagenet_recipes() -> None:
    a3, deit = load(plain("experiment=imagenet_resnet50")), load(plain("experiment=imagenet_vit_small"))
    assert updates(a3) == (8, 62_600) and updates(deit) == (8, 375_600)
    assert Schedule(a3.scheduler, 62_600, 626)(5 * 626) == 1.0 and Schedule(a3.scheduler, 62_600, 626)(5 * 626 - 2) < 1.0
    assert (a3.optimizer.opt, a3.optimizer.lr, a3.optimizer.weight_decay) == ("lamb", 8e-3, 0.02)
    assert (a3.data.image_size, a3.data.eval_size, a3.augment.policy[:7]) == (160, 224, "rand-m6")
    a1, a2, b, c, d = (load(plain(f"experiment=rsb_{name}")) for name in ("a1", "a2", "b", "c", "d"))
    assert updates(a1) == (8, 375_600) and updates(a2) == (8, 187_800)
    assert [(r.optimizer.lr, r.optimizer.weight_decay, r.loss.label_smoothing, r.augment.mixup) for r in (a1, a2)] == [
        (5e-3, 0.01, 0.1, 0.2), (5e-3, 0.02, 0.0, 0.1)]  # fmt: skip
    assert Schedule(b.scheduler, 450 * 1669, 1669)(25 * 1669) == pytest.approx(0.97**10)
    assert [r.optimizer.opt for r in (b, c, d)] == ["rmsproptf", "nesterov", "adamw"] and c.clip.factor == 0.01
    assert (deit.optimizer.lr, deit.model.drop_path_rate, deit.sampler.repeats) == (1e-3, 0.1, 3)


def test_an_evaluation_size_of_its_own(tmp_path: Path, photos: Path) -> None:
    shapes = set()
    words = ("logger=none", "threads=1", "data=image_folder", f"data.root={photos}", "data.num_workers=0", "data.image_size=24",
             "data.eval_size=32", "model=timm", "model.arch=test_resnet", "batch.effective=6", "epochs=1")  # fmt: skip
    train(tmp_path, *words, observe=lambda state, parts, window: shapes.add(tuple(window.micro_batches[0].inputs.shape)))
    assert shapes == {(6, 3, 24, 24)}
    splits = load(plain(*words)).data.load(None, 0)
    assert splits.train.dataset[0][0].shape == (3, 24, 24) and splits.eval.dataset[0][0].shape == (3, 32, 32)


def test_finetuning_goes_on_from_a_run_for_other_classes(tmp_path: Path, photos: Path) -> None:
    """The digits' network, frozen but for its classifier, on photos."""
    small = ("model=timm", "model.arch=test_convnext", "model.kwargs={}")
    train(tmp_path / "first", *FEW, "data=synthetic", "data.samples=12", "data.eval_samples=6", "data.num_classes=5", *small)
    words = (f"data.root={photos}", "data.num_workers=0", "data.image_size=32", "model.arch=test_convnext",
             "model.pretrained=false", f"model.checkpoint_path={tmp_path / 'first'}", "model.freeze=[backbone]")  # fmt: skip
    train(tmp_path / "second", "experiment=finetune", *FEW, *words)
    before, after = (checkpoint.load(tmp_path / name)["model"] for name in ("first", "second"))
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert moved == {"head.fc.weight", "head.fc.bias"} and after["head.fc.bias"].shape == (3,)


def test_layer_decay_reaches_the_input_of_the_finetuned_network() -> None:
    config = load(plain("experiment=finetune", "model.pretrained=false", "model.arch=test_convnext"))
    from isobatch.data import DataInfo

    model = config.model.build(DataInfo("photos", (3, 32, 32), 3))
    assert isinstance(config.optimizer, TimmOptimizer)
    names = {p: name for name, p in model.named_parameters()}
    rates = {names[p]: group["lr"] for group in config.optimizer.build(model, 64).param_groups for p in group["params"]}
    assert rates["head.fc.weight"] == pytest.approx(2e-4) and rates["stem.0.weight"] < 0.75**2 * 2e-4


def of_timms_users() -> tuple[list[str], list[list[str]]]:
    """Options of timm's that docs/timm.md names, and the words of its commands."""
    options, commands = [], []
    for line in re.findall(r"^\|(.*)\|$", (Path(__file__).parents[2] / "docs/timm.md").read_text(), re.MULTILINE):
        theirs, ours, _ = line.split("|")
        options += re.findall(r"`(--[a-z][a-z-]+)`", theirs)
        commands += [command.split() for command in re.findall(r"`([a-z+].*?)`", ours)]
    return options, [[word for word in command if not word.startswith("hydra.")] for command in commands]


def test_the_page_for_timms_users_names_settings_that_there_are() -> None:
    options, commands = of_timms_users()
    assert len(commands) > 75 and len(set(options)) == len(options) > 150
    whole = yaml.safe_load((conf_folder() / "config.yaml").read_text())
    usual = {group: choice for entry in whole["defaults"] if isinstance(entry, dict) for group, choice in entry.items()}
    for command in commands:
        words = dict(word.split("=", 1) for word in command)
        chosen = usual | {word: value for word, value in words.items() if word in usual}
        for word in words.keys() - usual.keys():
            group, _, key = word.lstrip("+").partition(".")
            node = yaml.safe_load((conf_folder() / group / f"{chosen[group]}.yaml").read_text()) if group in usual else whole
            for part in (key if group in usual else word).split(".")[: -1 if word.startswith("+") else None]:
                assert part in node, (command, word)
                node = node[part]


@pytest.mark.slow
def test_every_command_of_the_page_for_timms_users_is_one() -> None:
    for command in of_timms_users()[1]:
        load(plain(*command))
