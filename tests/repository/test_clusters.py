"""The files of examples/clusters: scripts that bash reads, commands that compose, an image whose files are there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from harness import plain

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "clusters"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))


def words_of(command: str) -> list[str]:
    """What stands after train.py, without what only the shell knows."""
    after = command.replace("\\\n", " ").partition("train.py")[2]
    return [word for word in shlex.split(after) if "$" not in word or word.startswith("hydra.")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_read_by_bash_and_its_command_composes(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    (command,) = re.findall(r"^srun (?:.*\\\n)*.*$", text, flags=re.MULTILINE)
    words = words_of(command)
    assert any(word.startswith("hydra.run.dir=") for word in words), "a job that is queued again has to find its folder"
    for setting in re.findall(r'"([^" ]+)"', text.partition("settings=(")[2].partition(")")[0]) or [""]:
        config = plain(*(word for word in (*words, setting) if word and not word.startswith("hydra.")))
        assert config["parallel"]["name"] == ("ddp" if "parallel=ddp" in words else "single")


def test_the_workers_of_kubernetes_train_on_the_ranks_that_torchrun_starts() -> None:
    (job,) = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    command = container["command"]
    assert command[0] == "torchrun" and "train.py" in command
    assert plain(*words_of(shlex.join(w for w in command if not w.startswith("hydra."))))["reduction"]["name"] == "exact"
    ranks = int(next(w for w in command if w.startswith("--nproc_per_node=")).partition("=")[2])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


def test_what_the_image_copies_is_there() -> None:
    lines = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT"}
    code = [line for line in lines if line and not line.startswith("#")]
    assert {line.split()[0] for line in code} <= known
    assert code[0].startswith("ARG BASE=") and code[1] == "FROM ${BASE}"
    copied = [source for line in code if line.startswith("COPY") for source in line.split()[1:-1]]
    assert copied and all((ROOT / source).exists() for source in copied)
    assert {"src", "conf", "pyproject.toml"} <= set(copied)
