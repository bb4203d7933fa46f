"""`isobatch.train`, `load`, `read` inside somebody else's program; docs/python.md runs as it stands."""

from __future__ import annotations

import csv
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from PIL import Image

import isobatch
from isobatch.errors import ConfigError
from isobatch.resume import rebuild

ROOT = Path(__file__).parents[1]
ALIEN = ("PYTEST", "TORCHINDUCTOR")  # variables of the environment that pytest and torch's compiler set
SHORT = ["logger=none", "model=mlp", "model.width=8", "threads=1", "epochs=null", "steps=2", "checkpoint.every_minutes=null"]


def test_the_page_about_python_runs_twice_beside_other_hydra_code(tmp_path: Path, monkeypatch) -> None:
    """As in a notebook: nothing of sys.argv is read, and what the program had of Hydra and logging is there afterwards."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL))
    assert code.count("isobatch.train(") == 2 and "isobatch.load(" in code
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.yaml").write_text("answer: 42\n")
    monkeypatch.setattr(sys, "argv", ["notebook", "--no-such-option"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handlers, environ = list(logging.getLogger().handlers), dict(os.environ)
    with initialize_config_dir(str(tmp_path / "theirs"), version_base="1.2"):
        mine, base = GlobalHydra.instance().hydra, version.getbase()
        exec(compile(code, "docs/python.md", "exec"), {"__name__": "__main__"})
        assert GlobalHydra.instance().hydra is mine and version.getbase() == base
        assert compose("config").answer == 42
    assert HydraConfig not in Singleton._instances or HydraConfig.instance().cfg is None
    assert list(logging.getLogger().handlers) == handlers and not logging.getLogger("isobatch").handlers
    assert {k: v for k, v in os.environ.items() if not k.startswith(ALIEN)} == {
        k: v for k, v in environ.items() if not k.startswith(ALIEN)}  # fmt: skip
    again = isobatch.train([*SHORT, "hydra.run.dir=again"])
    assert again.folder == tmp_path / "again" and again.summary["steps"] == 2 and again.plan["effective_batch"] == 48
    assert (again.folder / "train.log").read_text().count("completed") == 1
    assert (again.folder / ".hydra/overrides.yaml").is_file() and not (again.folder / ".lock").exists()
    assert again.model.step == 2 and again.config["model"]["width"] == 8


def test_refusals_are_exceptions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.width=0"):
        isobatch.train([*SHORT, "model.width=0"])
    for words, line in (("no.such=1", "no such setting"), ("accumulation=1,2", "several values")):
        with pytest.raises(ValueError, match=line):
            isobatch.train([words])
    with pytest.raises(ConfigError, match="is an option of the command"):
        isobatch.train(["-m"])
    with pytest.raises(TypeError, match="are a list"):
        isobatch.train("epochs=1")
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        isobatch.read(tmp_path)
    with pytest.raises(ConfigError, match=r"^resume=.*: holds no checkpoint"):
        isobatch.load(tmp_path)
    with pytest.raises(AttributeError):
        _ = isobatch.nothing
    assert not GlobalHydra.instance().is_initialized()


def test_rows_that_are_cut_off_or_not_finite(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": "nan"}\n{"step": 2, "train/loss": 0.5}\n{"step": 3, "tr')
    rows = isobatch.read(tmp_path)
    assert [row["step"] for row in rows] == [1, 2] and numpy.isnan(rows[0]["train/loss"])


def test_preprocessing_is_the_evaluations(tmp_path: Path) -> None:
    """Of a path, its bytes, a PIL image, an array and a tensor alike, and of a file with a large photo."""
    from isobatch.data import unlabelled
    from isobatch.data.device import ToDevice
    from isobatch.data.images import ImageOptions
    from isobatch.trained import TrainedModel

    known = rebuild.weights_know.Signature(("a", "b"), 2, (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), (3, 16, 16), 24, 0.875, "bicubic")
    info = rebuild.weights_know.info_of(known, "x")
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    model = TrainedModel(rebuild.Trained(network, info, {}, "x"), None)
    file = tmp_path / "a.png"
    Image.effect_noise((70, 50), 80).convert("RGB").save(file)
    options = ImageOptions(image_size=16, eval_size=24, crop_pct=0.875, interpolation="bicubic")
    split = unlabelled.load(str(file), options, info, "")
    expected = ToDevice(torch.device("cpu"), info, False).normalized(split.dataset[0][0].unsqueeze(0))[0]
    with Image.open(file) as image:
        image.load()
        for given in (file, str(file), file.read_bytes(), image, numpy.asarray(image),
                      torch.from_numpy(numpy.array(image)).permute(2, 0, 1)):  # fmt: skip
            assert torch.equal(model.preprocess(given), expected), type(given)
    found = model.predict([file, file], top=2)
    assert len(found) == 2 and found[0] == found[1] and {name for name, _ in found[0]} == {"a", "b"}
    assert sum(p for _, p in found[0]) == pytest.approx(1)
    masks = TrainedModel(rebuild.Trained(torch.nn.Conv2d(3, 2, 1), info, {}, "masks"), None)
    with pytest.raises(ValueError, match="masks answers no class for each image"):
        masks.predict(file)
    bare = TrainedModel(rebuild.Trained(network, rebuild.DataInfo("x", (7,)), {}, "numbers"), None)
    with pytest.raises(ValueError, match="numbers takes inputs of shape"):
        bare.preprocess(file)


def test_the_views_of_a_run_are_averaged_as_task_predict_does(tmp_path: Path) -> None:
    """Mirrored ones, a center and corners, of the run itself or asked for."""
    photos = tmp_path / "photos"
    for split in ("train", "val"):
        for name in ("a", "b"):
            (photos / split / name).mkdir(parents=True)
            for i in range(2):
                Image.effect_noise((24, 20), 90 + i).convert("RGB").save(photos / split / name / f"{i}.png")
    trained = isobatch.train([*SHORT, "data=image_folder", f"data.root={photos}", "data.image_size=8", "data.eval_size=12",
                              "data.num_workers=0", "batch.effective=4", "batch.shard=4", "evaluate.views=ten",
                              f"hydra.run.dir={tmp_path}/run"]).folder  # fmt: skip
    files = sorted((photos / "val").rglob("*.png"))
    model = isobatch.load(trained, "last")
    told = {}
    for views in ("ten", "five"):
        table = isobatch.train(["task=predict", f"resume={trained}", "predict.top=2", "logger=none",
                                f"predict.path={photos / 'val'}", f"evaluate.views={views}",
                                f"hydra.run.dir={tmp_path}/{views}"]).folder  # fmt: skip
        lines = csv.DictReader((table / "predictions.csv").read_text().splitlines())
        told[views] = [float(line["probability"]) for line in lines]
        found = model.predict(files, views=None if views == "ten" else views)
        assert [answers[0][1] for answers in found] == pytest.approx(told[views], abs=1e-6)
    assert model.views == "ten" and told["ten"] != told["five"]
    with pytest.raises(ConfigError, match=r"^views=six: .*choose one of one, flip"):
        model.predict(files, views="six")


@pytest.mark.slow
def test_several_processes_from_a_script_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import isobatch\nprint('read')\n"
        "for n in (1, 2):\n"
        f"    r = isobatch.train({SHORT!r} + ['reduction=exact', 'batch.micro=24', 'parallel=ddp', f'parallel.nproc={{n}}'])\n"
        "    print('weights', r.summary['weights_sha256'])\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("read") == 1 and len(set(re.findall(r"weights (\w{64})", done.stdout))) == 1
