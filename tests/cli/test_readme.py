"""Every command of the README runs as it stands there, only shorter (a few steps, small models)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).parents[2]
FEW = "epochs=null steps=2 logger=none eval_every=2"
SHORT = f"{FEW} model=mlp"  # importing timm costs every rank seconds
# a part of a command -> what is added to it instead of SHORT ("": it is short already)
ADDED = {
    "experiment=finetune": f"{FEW} model.arch=test_convnext model.pretrained=false batch.effective=6 data.image_size=32",
    "experiment=digits": FEW,
    "task=export": "",
    "task=replay": "replay.from=0",
    "photos": f"{SHORT} batch.effective=6 batch.shard=2 batch.micro=2 data.image_size=32",
    "hydra.run.dir=runs/first": "model=mlp logger=none",
    "resume=runs/first epochs": "",
    "task=evaluate": "",
    "task=predict": "",
    "task=plan": "",
    "experiment=article": "",
    "reduction=exact sweep": "steps=2 model=mlp",
    "experiment=equivalence": "steps=2 model=mlp",
    "experiment=memory": "steps=2 eval_every=2 model.arch=test_resnet batch.micro=8,64",
    "experiment=strategies": "steps=4 warmup=2 log_every=2 eval_every=4 plan=one,ddp2 precision=O0,O2",
    "sweep.dry_run": "",
    "model=custom": FEW,
    "isobatch.report": "",
    "train.py doctor": "",
    "debug=short": "model=mlp",
    "task=lr_range": "lr_range.steps=12 model=mlp",
}
SKIPPED = ("make ", "pip ")  # installing: CI does it before these tests


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *SKIPPED))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user's clone looks, with some photos."""
    from PIL import Image

    clone = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "train.py", clone)
    shutil.copytree(ROOT / "examples", clone / "examples")
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (clone / "photos" / split / label).mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (40, 40), (40 * i, 90, 20)).save(clone / "photos" / split / label / f"{i}.jpg")
    return clone


def shortened(command: str) -> list[str]:
    words = shlex.split(command)
    extra = FEW if command == "python train.py" else next((more for part, more in ADDED.items() if part in command), SHORT)
    return [*words, *extra.split()]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "WANDB_MODE": "offline"}
    while "=" in words[0] and not words[0].startswith("python"):
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    if words[0] != "python" or words == shortened("python train.py"):  # the first command of all starts as a person's does
        return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    return warm.run([sys.executable, *words[1:]], cwd=folder, env=environ, capture_output=True)


pytestmark = pytest.mark.xdist_group("readme")  # in order: some commands go on where others ended


# many ranks or many jobs: their parts have small tests of their own, so these run in `make test-all`
LONG = ("experiment=article", "reduction=exact parallel=ddp", "task=plan", "sweep.tolerance=0", "experiment=strategies",
        "experiment=equivalence", "experiment=memory", "parallel=fsdp", "experiment=digits", "experiment=finetune",
        "torchrun", "sweep.parallel_jobs", "sweep.dry_run", "photos", "task=evaluate", "task=predict",
        "task=export", "task=replay", "resume=runs/first epochs", "debug=short", "task=lr_range")  # fmt: skip


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.slow if any(part in c for part in LONG) else ()) for c in commands()],
)
def test_a_command_of_the_readme_runs(command: str, folder: Path) -> None:
    first = next(c for c in commands() if "hydra.run.dir=runs/first" in c)
    if "runs" in command and command != first and not (folder / "runs" / "first").exists():
        assert run(shortened(first), folder).returncode == 0  # what the command goes on with; tests may run in any order
    done = run(shortened(command), folder)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr, done.stderr[-2000:]


@pytest.mark.gpu_pretended
@pytest.mark.parametrize(("part", "strategy", "shown"), [
    ("parallel.devices=[0,1,3]", "dp", [0, 1, 3]),  # the sentence above it: `parallel=dp` takes the same list
    ("precision=amp", "single", [0]),
])  # fmt: skip
def test_its_lines_for_gpus_run_on_pretended_ones(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str,
                                                  strategy: str, shown: list[int]) -> None:  # fmt: skip
    """In this process, where ranks of ddp cannot be: tests/gpu has those."""
    from harness import plain
    from pretended import strictly

    from isobatch import launch

    monkeypatch.chdir(folder)
    line = next(command for command in commands() if part in command)
    typed = [word for word in shlex.split(line) if "=" in word and not word.startswith("--")]
    typed = [f"parallel={strategy}" if word == "parallel=ddp" else word for word in typed]
    more = f"{SHORT} steps=1 eval_every=1 batch.effective=6 batch.shard=2 batch.micro=2 data.num_workers=0 checkpoint=none"
    with strictly(4) as machine:
        launch.run(plain(*typed, *more.split(), *(["data.image_size=8"] if "photos" in line else [])), tmp_path)
        assert [machine.visible()[i] for i in range(4) if machine.peak[i]] == shown
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["state"] == "completed" and told["plan"]["num_replicas"] == len(shown)
    assert part != "precision=amp" or "bfloat16" in json.loads((tmp_path / "plan.json").read_text())["identity"]["precision"]


def test_the_tests_above_found_the_commands() -> None:
    found = commands()
    assert "python train.py" in found
    assert len(found) >= 15
    for part in ADDED:
        assert any(part in command for command in found), f"no command with {part} any more"


def test_promised_files_exist_after_a_run(folder: Path) -> None:
    done = run(["python", "train.py", "model=mlp", "logger=none", "epochs=null", "steps=2", "hydra.run.dir=runs/files"], folder)
    assert done.returncode == 0, done.stderr
    made = folder / "runs" / "files"
    for name in ("config.yaml", ".hydra", "plan.json", "metrics.jsonl", "summary.json", "train.log", "checkpoints/last"):
        assert (made / name).exists(), name
    summary = json.loads((made / "summary.json").read_text())
    assert summary["state"] == "completed"
    assert summary["error"] is None
    keys = {"state", "steps", "updates", "skipped_steps", "samples", "plan", "final", "best", "weights_sha256", "time", "perf",
            "ranks", "error"}  # fmt: skip
    assert keys <= set(summary)
    assert {"effective_batch", "micro_batch", "num_replicas", "accumulation_steps", "num_shards", "world_size"} <= set(
        summary["plan"]
    )


def test_links_and_files_named_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), target
