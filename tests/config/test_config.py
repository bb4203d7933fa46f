"""conf/ and the dataclasses say the same; every choice composes; hostile values get one line."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml
from harness import plain

from isobatch import tasks
from isobatch.config import TABLES, BatchOptions, Settings, load, loading, typed
from isobatch.config.loading import attributes
from isobatch.config.schema import NESTED
from isobatch.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"
FILES = [p for group in TABLES for p in sorted((CONF / group).glob("*.yaml"))]
CHOICES = [f"{p.parent.name}={p.stem}" for p in FILES if p.stem not in ("custom",)]


@pytest.mark.parametrize("file", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_file_shows_every_option_of_its_class(file: Path) -> None:
    node = yaml.safe_load(file.read_text())
    if node["name"] == "???" or "defaults" in node:
        return
    cls = TABLES[file.parent.name][node["name"]]
    assert set(node) == {f.name for f in dataclasses.fields(cls)}


def test_the_top_level_shows_every_setting() -> None:
    node = yaml.safe_load((CONF / "config.yaml").read_text())
    assert set(node) - {"defaults", "sweep", "hydra"} == {f.name for f in dataclasses.fields(Settings)} - {"sweep"}


WITH = {
    "data=random_matrix": ["model=linear", "loss=output_sum"],
    "loss=distill": ["loss.teacher.arch=resnet18"],
    "audit=replay": ["reduction=exact"],
    "metrics=torchmetrics": ["metrics.names=[MulticlassF1Score]"],
}
BY_GROUP = [[c for c in CHOICES if c.startswith(f"{group}=")] for group in TABLES]


@pytest.mark.parametrize("row", [*zip_longest(*BY_GROUP)], ids=lambda row: " ".join(filter(None, row))[:40])
def test_every_choice_composes_and_loads(row: tuple[str | None, ...]) -> None:
    """Composed one of each group at a time, which takes Hydra as long as one alone, and loaded one by one."""
    composed = plain(*filter(None, row))
    for choice in filter(None, row):
        if choice in WITH:
            made = plain(choice, *WITH[choice])
        else:
            group = choice.partition("=")[0]
            made = {**plain(), group: composed[group]}
        assert load(made).plain["epochs"] == 15, choice  # whether the folder is there is asked later


@pytest.mark.parametrize("plan", sorted(p.stem for p in (CONF / "plan").glob("*.yaml")))
def test_every_plan_composes_and_loads(plan: str) -> None:
    load(plain(f"plan={plan}"))


EXPERIMENTS, HARDWARE = (sorted(p.stem for p in (CONF / o).glob("*.yaml")) for o in ("experiment", "plan"))
# each with each would be minutes of composing: every experiment with a plan, every plan with an experiment
PAIRS = sorted({(e, HARDWARE[i % len(HARDWARE)]) for i, e in enumerate(EXPERIMENTS)}
               | {(EXPERIMENTS[i % len(EXPERIMENTS)], p) for i, p in enumerate(HARDWARE)})  # fmt: skip


# in the fast suite each plan once, with the recipes whose commands test_recipes.py does not compose there
ALONE = ("class_weighted", "focal", "rsb_a1", "rsb_a2", "rsb_b", "rsb_c", "rsb_d")
FAST = {(e, HARDWARE[i % len(HARDWARE)]) for i, e in enumerate(ALONE)}


@pytest.mark.parametrize(("experiment", "plan"), [
    pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow) for pair in sorted({*PAIRS, *FAST})
])  # fmt: skip
def test_an_experiment_loads_and_takes_any_plan(experiment: str, plan: str) -> None:
    load(plain(f"experiment={experiment}"))
    before, after = plain(f"experiment={experiment}"), plain(f"experiment={experiment}", f"plan={plan}")
    changed = {key for key in after if after[key] != before[key]}
    assert changed <= {"parallel", "precision", "accumulation", "compile", "channels_last", "threads", "batch"}
    assert after["batch"]["effective"] == before["batch"]["effective"], "a plan touched the contract"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["batch.effective=0"], "batch.effective", "positive"),
        (["batch.effective=-3"], "batch.effective", "positive"),
        (["model=linear", "model.outputs=-1"], "model.outputs", "positive"),
        (["model=mlp", "model.width=100000000000"], "model.width", "number that can be meant"),
        (["batch.effective=many"], "batch.effective", "is no whole number"),
        (["batch.micro=64"], "batch.micro", "more than batch.effective=48"),
        (["batch.micro=big"], "batch.micro", "positive integer"),
        (["batch.micro=1.5"], "batch.micro", "positive integer"),
        (["batch.effective=null"], "batch.effective", "neither"),
        (["batch.micro=8", "accumulation=2"], "accumulation.steps", "takes 6 micro steps, not 2"),
        (["accumulation=0"], "accumulation", "positive integer"),
        (["accumulation=-1"], "accumulation", "positive integer"),
        (["accumulation=1.5"], "accumulation", "positive integer"),
        (["accumulation=x"], "accumulation", "positive integer"),
        (["steps=10", "epochs=3"], "steps", "set only steps=10, or only epochs=3"),
        (["epochs=null"], "steps", "exactly one of steps and epochs=null has to be null; set only steps=1000, or"),
        (["epochs=0"], "epochs", "positive"),
        (["task=fly"], "task", "train, evaluate, predict, export, plan"),
        (["task=evaluate"], "resume", "needs a run"),
        (["seed=-1"], "seed", "2^63"),
        (["optimizer.lr=fast"], "optimizer.lr", "is no number"),
        (["optimizer.lr=-1"], "optimizer.lr", "between"),
        (["optimizer.lr=nan"], "optimizer.lr", "between"),
        (["optimizer.layer_decay=-1"], "optimizer.layer_decay", "positive"),
        (["optimizer.layer_decay=0"], "optimizer.layer_decay", "positive"),
        (["log_weights=-1"], "log_weights", "between"),
        (["data=image_folder", "data.image_size=[8]"], "data.image_size", "neither a side in pixels nor [height, width]"),
        (["data=image_folder", "data.eval_size=[]"], "data.eval_size", "neither a side in pixels nor [height, width]"),
        (["sampler.tail=chop"], "sampler.tail", "keep, drop, pad"),
        (["model.name=resnet"], "model.name", "no such model"),
        (["+model.widht=3"], "model.widht", "no such option"),
        (["+parallel.nproc=2"], "parallel.nproc", "leave it out, or set parallel=ddp or fsdp, which have it"),
        (["+parallel.nprocs=2"], "parallel.nprocs", "; leave it out"),
        (["+optimizer.lrr=1"], "optimizer.lrr", "did you mean optimizer.lr"),
        (["imports=[no_such_file.py]"], "imports", "set imports=[no_such_file]"),
        (["parallel=ddp", "parallel.devices=[0,0]"], "parallel.devices", "different"),
        (["parallel=ddp", "parallel.nproc=2", "parallel.devices=[0,1,3]"], "parallel.nproc", "3 devices"),
        (["parallel=ddp", "parallel.timeout_s=0"], "parallel.timeout_s", "positive"),
        (["max_grad_norm=0"], "max_grad_norm", "positive"),
        (["imports=[no_such_package]"], "imports", "cannot be imported"),
        (["loss.label_smoothing=2"], "loss.label_smoothing", "between"),
        (["data.num_workers=abc"], "data.num_workers", "is no whole number"),
        (["parallel=ddp", "parallel.devices=3"], "parallel.devices", "is no list"),
        (["model.kwargs=3"], "model.kwargs", "is no group of settings"),
        (["channels_last=maybe"], "channels_last", "is neither true nor false"),
        (["ema=ema", "ema.device=abc"], "ema.device", "is no device"),
        (["logger=several", "logger.loggers=[]"], "logger.loggers", "names no logger"),
        (["loss=distill", "loss.teacher.checkpoint=3"], "loss.teacher.checkpoint", "is no path"),
        (["loss=distill", "loss.teacher.arch=resnet18", "loss.teacher.kwargs=3"], "loss.teacher.kwargs", "is no mapping"),
        (["on_nonfinite=pray"], "on_nonfinite", "stop, skip"),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)  # fmt: skip
def test_a_wrong_value_gets_one_line_with_key_value_and_way_out(overrides: list[str], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tasks.of(load(plain(*overrides)))
    line = str(refusal.value)
    assert line.startswith((f"{key}=", f"{key}.")), line
    assert says in line and "; " in line and "\n" not in line


def test_the_top_level_defaults_are_those_of_the_file() -> None:
    written = plain()
    for field in dataclasses.fields(Settings):
        if field.name not in NESTED:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            assert written[field.name] == default, field.name
    for name, options in NESTED.items():
        assert attributes(written[name]) == dataclasses.asdict(options()), name


def test_settings_that_were_typed_before_are_told_apart_and_shared_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (typed(TABLES["logger"]["wandb"], {"name": "wandb", "tags": ["a"]}, "logger.") for _ in range(2))
    assert first == again and first is not again and first.tags is not again.tags and first.alerts is not again.alerts
    monkeypatch.setattr(loading, "MOST_KNOWN", 2)
    made = [typed(BatchOptions, {"micro": micro}, "batch.").micro for micro in (1, "auto", 3, 4, 1)]
    assert made == [1, "auto", 3, 4, 1] and len(loading._known) <= 2
    for same in (True, 1.0, "1"):  # equal to 1, or written like it
        with pytest.raises(ConfigError, match="neither a positive integer"):
            typed(BatchOptions, {"micro": same}, "batch.")
