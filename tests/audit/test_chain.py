"""`audit/state`: a chain of digests that is the same on every plan and after a resume, and shows every bit of the state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import BASE, plain, rows, summary, train

from isobatch import config as configuration
from isobatch.errors import ConfigError

RUN = (*BASE, "epochs=null", "steps=4", "log_every=9", "eval_every=2", "batch.micro=12", "batch.effective=24",
       "batch.shard=null", "reduction=exact", "checkpoint.every=2", "ema=ema", "optimizer=adamw")  # fmt: skip


def test_the_chain_is_that_of_the_training(tmp_path: Path) -> None:
    def flipped(state: object, parts: object, data: object) -> None:
        """One bit of one moment, after the third step."""
        if state.step == 2:  # type: ignore[attr-defined]
            moments = next(iter(state.optimizer.state.values()))["exp_avg_sq"]  # type: ignore[attr-defined]
            moments.data.view(-1).view(torch.int32)[0] ^= 1

    words = {"one": (), "two": ("parallel=dp", "parallel.replicas=2"), "often": ("audit.state=1",),
             "never": ("audit.state=null",), "rest": (f"resume={tmp_path / 'one'}", "checkpoint.load=step-2")}  # fmt: skip
    for name, more in words.items():
        train(tmp_path / name, *RUN, *more)
    train(tmp_path / "off", *RUN, observe=flipped)
    states = {name: rows(tmp_path / name, "audit/state") for name in (*words, "off")}
    chains = {name: rows(tmp_path / name, "audit/chain") for name in states}
    assert len(set(states["one"])) == 2 and states["two"] == states["one"] and chains["two"] == chains["one"]
    assert states["rest"] == states["one"][1:] and chains["rest"] == chains["one"][1:]
    assert len(states["often"]) == 4 and states["often"][1::2] == states["one"] and states["never"] == []
    assert states["off"][0] == states["one"][0] and states["off"][1] != states["one"][1]
    assert summary(tmp_path / "rest")["audit"] == summary(tmp_path / "one")["audit"] == {"links": 2, "head": chains["one"][1]}
    assert "audit" not in summary(tmp_path / "never")


def test_data_have_a_fingerprint_that_sees_names_labels_and_contents(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in (1, 2):
                Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "data" / split / name / f"{number}.png")

    def prints(kind: str) -> dict[str, str]:
        made = configuration.load(plain(*BASE, "data=image_folder", f"data.root={tmp_path / 'data'}", "data.image_size=8",
                                        f"data.fingerprint={kind}"))  # fmt: skip
        splits = made.data.load(None, 0)
        return splits.fingerprint(made.data)["data_fingerprint"]["train"]  # type: ignore[no-any-return]

    names, contents = prints("names"), prints("contents")
    assert names["samples"] == 4 and "contents" not in names and contents.items() > names.items()
    Image.new("RGB", (8, 8), (9, 0, 0)).save(tmp_path / "data" / "train" / "a" / "1.png")
    assert prints("names") == names and prints("contents")["contents"] != contents["contents"]
    (tmp_path / "data" / "train" / "a" / "1.png").rename(tmp_path / "data" / "train" / "b" / "3.png")
    moved = prints("names")
    assert moved["names"] != names["names"] and moved["labels"] != names["labels"] and moved["samples"] == 4


@pytest.mark.parametrize("word", ["audit.state=0", "audit.state=often"])
def test_refusals(word: str) -> None:
    with pytest.raises(ConfigError, match=r"audit\.state"):
        configuration.load(plain(*BASE, word))
