"""Makes the run folders of `runs/` anew: `PYTHONPATH=src python tests/compat/make_runs.py RELEASE`, from the repository.

A folder `runs/<release>` is made once, by that release itself, and stays as it is: what a later version makes of it is the
promise that test_old_runs.py holds. It is a person's folder as far as it can be: commands wrote it, in another place.
`expected.json` says what that release made of each when it went on from it, and `expected/` with which weights.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FEW = ("logger=none", "epochs=null", "steps=6", "log_every=1", "eval_every=3", "checkpoint.every=3", "checkpoint.keep=1",
       "threads=1", "scheduler=constant")  # fmt: skip
IMAGES = ("data=synthetic", "data.samples=40", "data.eval_samples=12", "data.image_size=16", "data.num_classes=3")
# name -> what was typed; a sweep starts with -m
RUNS: dict[str, tuple[str, ...]] = {
    "integers": (*FEW, "imports=[integers]", "data=custom", "data.name=integers", "data.num_workers=0", "model=linear",
                 "model.init=ones", "loss=mse", "optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0.5",
                 "optimizer.weight_decay=0", "batch.effective=8", "steps=2"),
    "plain": (*FEW, "data=digits", "model=mlp", "model.width=8", "model.depth=1", "max_grad_norm=1.0"),
    "batch_norm": (*FEW, *IMAGES, "model=timm", "model.arch=test_resnet", "+model.kwargs.channels=[4,4,4,4]", "ema=ema",
                   "ema.decay=0.8", "reduction=exact", "reduction.method=tree", "batch.effective=16", "batch.micro=4",
                   "checkpoint.best=null", "augment=mixup", "optimizer=sgd", "optimizer.lr=0.05"),
    "ddp": (*FEW, "data=digits", "model=mlp", "model.width=8", "model.depth=1", "model.norm=true", "parallel=ddp",
            "parallel.nproc=2", "precision=amp", "precision.dtype=float16", "batch.micro=12", "reduction=exact",
            "reduction.method=bin64"),
    "sweep": ("-m", *FEW, "data=digits", "model=mlp", "model.width=8", "model.depth=1", "accumulation=1,3"),
}  # fmt: skip
MORE = ("steps=9",)  # what each goes on to; `integers` needs no more bits than fp32 has
MORE_OF = {"integers": ("steps=4", "imports=[integers]")}


def command(*words: str, cwd: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE)])}
    subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=cwd, env=environ, check=True, timeout=600)


def jobs(name: str) -> list[str]:
    return [f"{name}/0", f"{name}/1"] if name == "sweep" else [name]


def main(release: str) -> None:
    target = HERE / "runs" / release
    if target.exists():
        sys.exit(f"{target} is there already; a release's runs are made once")
    with tempfile.TemporaryDirectory() as place:
        top = Path(place) / "home"
        top.mkdir()
        expected: dict[str, Any] = {}
        for name, words in RUNS.items():
            kind = "hydra.sweep.dir" if "-m" in words else "hydra.run.dir"
            command(*words, f"{kind}={name}", cwd=top)
        shutil.copytree(top, target)
        (target / "expected").mkdir()
        for name in RUNS:
            for job in jobs(name):
                flat = job.replace("/", "-")
                command(f"resume={job}", *MORE_OF.get(name, MORE), f"hydra.run.dir=on/{flat}", cwd=top)
                command(f"resume={job}", "task=evaluate", f"hydra.run.dir=again/{flat}",
                        *(word for word in MORE_OF.get(name, ()) if word.startswith("imports")), cwd=top)  # fmt: skip
                summaries = {part: json.loads((top / part / flat / "summary.json").read_text()) for part in ("on", "again")}
                expected[job] = {
                    "weights_sha256": summaries["on"]["weights_sha256"], "resumed": summaries["on"]["final"],
                    "steps": summaries["on"]["steps"], "evaluated": summaries["again"]["final"],
                }  # fmt: skip
                shutil.copy(top / "on" / flat / "checkpoints" / "last" / "model.safetensors",
                            target / "expected" / f"{flat}.safetensors")  # fmt: skip
        (target / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
        tidy(target, top)


def tidy(target: Path, made_in: Path) -> None:
    """Where it was made is nobody's business; pictures are large and made anew."""
    import platform

    for path in sorted(target.rglob("*")):
        if path.suffix in (".png", ".html"):
            path.unlink()
        elif path.is_file() and path.suffix not in (".pt", ".safetensors"):
            text = path.read_text()
            for found, neutral in ((str(ROOT), "/opt/isobatch"), (str(made_in), "/home/someone"), (platform.node(), "host")):
                text = text.replace(found, neutral)
            path.write_text(text)
    for path in sorted(target.rglob("report"), reverse=True):
        if path.is_dir():
            shutil.rmtree(path)


if __name__ == "__main__":
    main(sys.argv[1])
