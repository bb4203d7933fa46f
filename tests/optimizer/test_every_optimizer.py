"""Every optimizer of timm either trains, saves and resumes to the bit, or is refused in one line before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import train

from isobatch.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # timm's own, of some of them
WORDS = ("logger=none", "threads=1", "model=mlp", "model.width=4", "model.depth=1", "scheduler=constant", "epochs=null",
         "batch.effective=8", "eval_every=100", "optimizer.lr=0.001", "optimizer.weight_decay=0.01", "ema=none")  # fmt: skip
SAMPLE = ("novograd", "adafactorbv", "lookahead_adamw", "lamb", "adopt", "muon", "adafactor", "mars", "sgdp")
FAST = ("lookahead_adamw", "muon", "adafactorbv", "mars")  # a wrapper, a fallback, no momentum, a closure of its own


def resumes_to_the_bit(folder: Path, opt: str) -> None:
    words = (*WORDS, f"optimizer.opt={opt}")
    try:
        whole = train(folder / "whole", *words, "steps=4")
    except ConfigError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert opt not in SAMPLE and refusal.key.startswith("optimizer.") and not (folder / "whole/metrics.jsonl").exists()
        return
    train(folder / "part", *words, "steps=2")
    assert train(folder / "again", *words, "steps=4", f"resume={folder / 'part'}").weights[-1] == whole.weights[-1], opt


@pytest.mark.parametrize("opt", [pytest.param(opt, marks=() if opt in FAST else pytest.mark.slow) for opt in SAMPLE])
def test_a_sample_of_timms_optimizers(tmp_path: Path, opt: str) -> None:
    resumes_to_the_bit(tmp_path, opt)


@pytest.mark.slow
def test_all_of_timms_optimizers(tmp_path: Path) -> None:
    import timm.optim

    names = [name for name in timm.optim.list_optimizers() if name not in SAMPLE and "kron" not in name]  # test_draws.py has it
    for name in [*names, "lookahead_sgd", "lookahead_lamb"]:
        resumes_to_the_bit(tmp_path / name, name)


def test_an_optimizer_that_wants_what_no_training_gives_is_refused_in_one_line(tmp_path: Path) -> None:
    """adahessian wants gradients of gradients."""
    with pytest.raises(ConfigError, match=r"^optimizer\.opt=adahessian: cannot make a step here \(RuntimeError"):
        train(tmp_path, *WORDS, "optimizer.opt=adahessian", "steps=1")
