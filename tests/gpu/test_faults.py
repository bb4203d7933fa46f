"""What a reading of the code and a pretended device found to fail on GPUs, each once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import summary, train
from jobs import Network, apart, job, on_cpu, on_gpus
from pretended import pretend

from isobatch import run
from isobatch.data import Split
from isobatch.errors import JobFailed
from isobatch.run import assembled
from isobatch.runtime.distributed import Ranks

pytestmark = pytest.mark.gpu_pretended
SAVING = "checkpoint=default", "checkpoint.every=2"
ONCE = "steps=1", "eval_every=1"


def test_an_average_on_the_host_is_the_one_beside_the_model(tmp_path: Path) -> None:
    """Evaluated, saved, resumed and evaluated again (task=evaluate)."""
    beside = on_cpu(tmp_path / "cpu", job("ema=ema", "ema.decay=0.5", *SAVING))
    away = on_gpus(tmp_path / "gpu", job("ema=ema", "ema.decay=0.5", "ema.device=cpu", *SAVING))
    assert apart(beside, away) < 1e-6
    more = f"resume={tmp_path / 'gpu'}", "steps=6", *SAVING
    resumed = on_gpus(tmp_path / "more", job("ema=ema", "ema.decay=0.5", "ema.device=cpu", *more))
    whole = on_cpu(tmp_path / "whole", job("ema=ema", "ema.decay=0.5", "steps=6"))
    assert resumed.rows[-1]["eval/loss"] == pytest.approx(whole.rows[-1]["eval/loss"], abs=1e-6)
    with pretend():
        run.run_job(job("task=evaluate", f"resume={tmp_path / 'more'}", "ema=ema", "ema.decay=0.5", "ema.device=cpu"),
                    tmp_path / "evaluated", Ranks())  # fmt: skip
    found = json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())["result"]
    assert found["eval/loss"] == pytest.approx(whole.rows[-1]["eval/loss"], abs=1e-6)


def test_a_label_out_of_range_ends_with_a_line_and_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device-side assertion: from then on everything on the device raises, and no ending may need it."""
    forward = Network.forward
    monkeypatch.setattr(Network, "forward", lambda self, images: forward(self, images)[:, : 5 if len(images) > 2 else 10])
    with pretend(), pytest.raises(JobFailed, match=r"the device failed.*device-side assert.*label"):
        run.run_job(job(*SAVING), tmp_path, Ranks())
    told = summary(tmp_path)
    assert told["state"] == "failed" and told["weights_sha256"] is None and "label" in told["error"]
    assert (tmp_path / "metrics.jsonl").exists() or told["steps"] == 0


def test_a_device_that_dies_in_mid_run_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def kill(state: Any, parts: Any, data: Any) -> None:
        if state.step == 3:
            machine.dead = "CUDA error: an illegal memory access was encountered"

    with pretend() as machine, pytest.raises(JobFailed, match="the device failed"):
        train(tmp_path, made=job(*SAVING, "steps=8"), observe=kill)
    assert summary(tmp_path)["state"] == "failed" and summary(tmp_path)["steps"] >= 3
    assert (tmp_path / "checkpoints" / "step-2").exists()


def test_peak_memory_is_each_jobs_own(tmp_path: Path) -> None:
    with pretend() as machine:
        peaks = []
        for name, words in (("large", ("data.image_size=40",)), ("small", ())):
            run.run_job(job(*words), tmp_path / name, Ranks())
            peaks.append(summary(tmp_path / name)["ranks"][0]["peak_memory_mb"])
        assert peaks[1] < peaks[0] / 3
        assert not machine.faults


def test_one_stream_copies_all_batches_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the memory that a stream has used for that stream alone: a new one per evaluation would keep growing."""
    make = assembled.make_source
    monkeypatch.setattr(assembled, "make_source", lambda split, *rest: make(  # of batches that are not on the device already
        Split(split.dataset, info=split.info, light=True), *rest))  # fmt: skip
    few = on_gpus(tmp_path / "few", job("data.num_workers=0", "eval_every=4")).machine
    many = on_gpus(tmp_path / "many", job("data.num_workers=0", "eval_every=1")).machine
    assert few is not None and many is not None and many.streams == few.streams <= 3


@pytest.mark.parametrize("words", [
    "reduction=exact", "augment=mixup augment.mix_mode=elem",
    *(pytest.param(w, marks=pytest.mark.slow) for w in ("reduction=exact reduction.method=bin64", "loss=jsd", "augment=mixup")),
])  # fmt: skip
def test_the_bits_of_one_cpu(tmp_path: Path, words: str) -> None:
    one = on_cpu(tmp_path / "cpu", job(*words.split()))
    assert apart(one, on_gpus(tmp_path / "gpu", job(*words.split()))) == 0


def test_logging_leaves_gradients_alone() -> None:
    from isobatch.train.state import TrainState

    model = torch.nn.Linear(2, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters()), None)  # type: ignore[arg-type]
    model.weight.grad, model.bias.grad = torch.tensor([[3e38, 3e38]]), torch.tensor([1.0])
    assert state.clip_gradients(None).isinf()  # its square overflows
    assert model.bias.grad.tolist() == [1.0] and model.weight.grad.isfinite().all()
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([0.0])
    assert state.clip_gradients(1.0).item() == 5 and model.weight.grad.norm().item() == pytest.approx(1, abs=1e-5)


ATTENTION = "the backward of attention (Flash) has an order of its own; deterministic=true takes its deterministic kernel"
POOLING = "adaptive_avg_pool2d_backward_cuda has no deterministic kernel; deterministic=true refuses it"


def test_exact_names_what_has_no_deterministic_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """Twice, since torch warns of some things once a process; the training hears no warning."""
    forward = Network.forward
    pooled = torch.nn.AdaptiveAvgPool2d(3)
    monkeypatch.setattr(Network, "forward", lambda self, images: forward(self, pooled(self.stem[0](images))[:, :1]))
    for folder in ("one", "two"):
        with pretend():
            caplog.clear()
            run.run_job(job("reduction=exact", *ONCE), tmp_path / folder, Ranks())
        said = [line for line in caplog.messages if line.startswith("reduction=exact: ")]
        assert said == [f"reduction=exact: {POOLING}", f"reduction=exact: {ATTENTION}"]
        assert json.loads((tmp_path / folder / "plan.json").read_text())["not_deterministic"] == [POOLING, ATTENTION]
    assert torch.get_deterministic_debug_mode() == 0
    caplog.clear()
    with pretend():
        run.run_job(job(*ONCE), tmp_path / "fast", Ranks())
    assert "not_deterministic" not in (tmp_path / "fast" / "plan.json").read_text()


def test_deterministic_takes_attentions_own_and_refuses_the_rest(tmp_path: Path) -> None:
    with pretend():
        run.run_job(job("reduction=exact", "deterministic=true", *ONCE), tmp_path, Ranks())
    assert "not_deterministic" not in (tmp_path / "plan.json").read_text()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_gradients_is_a_wide_number(dtype: torch.dtype) -> None:
    """Of 100 gradients of 3e4 it is above fp16's largest number; a layer kept in fp32 is among them."""
    from isobatch.train.state import TrainState

    model = torch.nn.ModuleList([torch.nn.Linear(10, 10, bias=False, dtype=dtype), torch.nn.Linear(1, 1, bias=False)])
    state = TrainState(model, torch.optim.SGD(model.parameters()), None)  # type: ignore[arg-type]
    model[0].weight.grad, model[1].weight.grad = torch.full((10, 10), 3e4, dtype=dtype), torch.full((1, 1), 4e5)
    wanted = (model[0].weight.grad.double().square().sum() + 16e10).sqrt().item()
    for max_norm, factor in ((None, 1.0), (2 * wanted, 1.0), (wanted / 4, 0.25)):
        before = [p.grad.clone() for p in model.parameters()]
        assert state.clip_gradients(max_norm).item() == pytest.approx(wanted, rel=1e-5)
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert parameter.grad.dtype == old.dtype
            assert torch.allclose(parameter.grad.float(), old.float() * factor, rtol=1e-2)


@pytest.mark.parametrize("words", ["augment=simple data.num_workers=0", ""])
def test_bin64_holds_one_micro_batch_on_the_device(tmp_path: Path, words: str) -> None:
    """Its windows may be run again (the first one always is): what they need then stays in main memory."""
    base = "reduction=exact", "reduction.method=bin64", "data.image_size=24", "data.samples=70", "data.eval_samples=7"
    peaks, images = [], 7 * 24 * 24 * 4  # bytes of a micro batch
    for effective in (14, 70):
        with pretend() as machine:
            made = job(*base, *words.split(), f"batch.effective={effective}", "steps=1", "eval_every=1", "log_every=9")
            run.run_job(made, tmp_path / f"{effective}", Ranks())
        peaks.append(machine.peak[0])
    assert abs(peaks[1] - peaks[0]) < images, [peak / images for peak in peaks]


def test_what_is_mixed_again_is_mixed_from_what_was_read(tmp_path: Path) -> None:
    """Mixing works in place: a second run of a window begins with the samples, not with mixtures of them."""
    words = "augment=mixup", "reduction=exact", "reduction.method=bin64", "data.num_workers=0", "steps=1", "eval_every=1"
    seen = []

    def look(state: Any, parts: Any, data: Any) -> None:
        seen.append([[m.inputs.cpu() for m in data.micro_batches] for _ in range(2)])

    train(tmp_path / "cpu", made=job(*words), observe=look)
    with pretend():
        train(tmp_path / "gpu", made=job(*words), observe=look)
    first, *others = (images for window in seen for images in window)
    assert len(others) == 3 and all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_checkpoint_is_copied_beside_the_training(tmp_path: Path) -> None:
    """Into one piece of page-locked memory of the right size, for all saves of a run; nobody reads it too early."""
    pieces: list[dict[int, int]] = []
    with pretend() as machine:
        train(tmp_path / "gpu", made=job(*SAVING, "steps=6", "optimizer=adamw", "optimizer.lr=0.002", "checkpoint.keep=9"),
              observe=lambda *_: pieces.append(dict(machine.registered)))  # fmt: skip
    assert not machine.faults and machine.waits_in("checkpoint/") == 0, dict(machine.syncs)
    (piece,) = {tuple(p.items()) for p in pieces if p}
    assert [len(p) for p in pieces[:3]] == [0, 0, 1] and len(piece) == 1
    read = [load(tmp_path / f"gpu/checkpoints/step-{n}") for n in (2, 4, 6)]
    sizes = [t.numel() * t.element_size() for t in leaves(read[0])]
    assert sum(sizes) <= piece[0][1] < sum(sizes) + 64 * len(sizes)
    train(tmp_path / "cpu", made=job(*SAVING, "steps=6", "optimizer=adamw", "optimizer.lr=0.002", "checkpoint.keep=9"))
    for found, n in zip(read, (2, 4, 6), strict=True):
        expected = load(tmp_path / f"cpu/checkpoints/step-{n}")
        assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))


def load(folder: Path) -> Any:
    return torch.load(folder / "state.pt", weights_only=True)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
