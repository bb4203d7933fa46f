"""Reported faults of mixed precision (cases 14 to 17): skipped steps, the scale on resume, clipping, what a level means."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import mean_probe, rows, summary, train
from precision_probes import PLAIN_SGD, QUIET, ConvNorm, Scaled, data_of, model_of

from isobatch import checkpoint
from isobatch.errors import JobFailed
from isobatch.train.state import weights_sha256

BAD = 1e20  # as a target: its squared error leaves the range of fp32, its gradient that of fp16
FP16 = ("precision=amp", "precision.dtype=float16", "precision.loss_scale=1024")
CLIP = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)


# -- case 14: a skipped step moves nothing -------------------------------------------------------------------------------
@pytest.mark.case(14)
def test_a_skipped_step_moves_neither_schedule_nor_ema_nor_count(tmp_path: Path) -> None:
    averages: list[float] = []
    record = train(tmp_path, *mean_probe([1, BAD, 3, 4, 5, 6]), *FP16, "batch.effective=1", "ema=ema",
                   "ema.decay=0.5", "ema.warmup=false", "scheduler=cosine",
                   observe=lambda state, parts, data: averages.append(state.ema.module[1].bias.item()))  # fmt: skip
    done = summary(tmp_path)
    assert (done["steps"], done["updates"], done["skipped_steps"]) == (6, 5, 1)
    assert rows(tmp_path, "train/loss_scale") == [1024, 512, 512, 512, 512, 512]
    assert rows(tmp_path, "train/skipped_steps") == [0, 1, 1, 1, 1, 1]
    assert record.lrs[0] != record.lrs[1] == record.lrs[2] != record.lrs[3], "the schedule moved with a step that was skipped"
    assert record.last[1] == record.last[0] and averages[1] == averages[0]
    biases = [record.last[i] for i in (0, 2, 3, 4, 5)]
    expected = 0.0
    for bias in biases:
        expected = (expected + bias) / 2
    assert averages[-1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.case(14)
def test_one_bad_micro_batch_costs_its_window_alone(tmp_path: Path) -> None:
    targets = [1, 2, 3, 4, BAD, 6, 7, 8, 9]
    record = train(tmp_path, *mean_probe(targets), *FP16, "batch.effective=3", "batch.micro=1", "batch.shard=null")
    assert record.last == pytest.approx([2, 2, 8], abs=1e-2)
    assert summary(tmp_path)["skipped_steps"] == 1


@pytest.mark.case(14)
def test_batch_norm_does_not_learn_from_a_skipped_step(tmp_path: Path) -> None:
    inputs = torch.randn(8, 1, 8, 8)
    inputs[3] = math.inf
    seen: list[tuple[float, int]] = []
    train(tmp_path, *QUIET, *model_of("conv_norm", lambda info: ConvNorm()),
          *data_of("conv_inf", inputs, torch.zeros(8, dtype=torch.int64), 10), *PLAIN_SGD, "steps=2", "batch.effective=4",
          "batch.micro=2", "batch.shard=null", "precision=O2", "precision.loss_scale=4", "eval_every=100",
          observe=lambda state, parts, data: seen.append(
              (state.model.norm.running_mean.sum().item(), int(state.model.norm.num_batches_tracked))))  # fmt: skip
    assert seen[0] == (0.0, 0) and seen[1][0] != 0.0 and seen[1][1] == 1


@pytest.mark.case(14)
def test_a_scale_that_collapses_stops_with_advice(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"min_loss_scale=1\).*precision=bf16"):
        train(tmp_path, *mean_probe([BAD] * 20), *FP16, "batch.effective=1", "precision.loss_scale=4")
    done = summary(tmp_path)
    assert (done["state"], done["steps"]) == ("failed", 2)  # 4, 2, and at 1 it is given up


# -- case 15: the scale survives a resume --------------------------------------------------------------------------------
@pytest.mark.case(15)
def test_the_scale_and_its_counter_are_resumed(tmp_path: Path) -> None:
    words = (*mean_probe([1, 2, 3, 4, 5, 6]), *FP16, "precision.growth_interval=2", "batch.effective=1", "epochs=null")
    train(tmp_path / "a", *words, "steps=5")
    assert checkpoint.load(tmp_path / "a")["scaler"] == {"scale": 4096.0, "_growth_tracker": 1}
    train(tmp_path / "b", *words, "steps=6", f"resume={tmp_path / 'a'}")
    assert rows(tmp_path / "b", "train/loss_scale")[-1] == 8192


@pytest.mark.case(15)
def test_a_checkpoint_without_a_scaler_loads_under_amp_and_says_so(tmp_path: Path, caplog) -> None:
    words = (*mean_probe([1, 2, 3, 4]), "batch.effective=1", "epochs=null")
    train(tmp_path / "a", *words, "steps=2")
    assert checkpoint.load(tmp_path / "a")["scaler"] == {}
    with caplog.at_level("INFO"):
        train(tmp_path / "b", *words, "steps=3", *FP16, f"resume={tmp_path / 'a'}")
    assert caplog.text.count("no loss scale: it starts at 1024") == 1 == caplog.text.count("resume: the checkpoint has")
    assert rows(tmp_path / "b", "train/loss_scale")[-1] == 1024


# -- case 16: accumulation, amp and clipping -----------------------------------------------------------------------------
@pytest.mark.case(16)
def test_gradients_are_unscaled_once_per_window(tmp_path: Path) -> None:
    record = train(tmp_path, *mean_probe(list(range(1, 11))), *FP16, "batch.effective=6", "batch.micro=2", "batch.shard=null",
                   "max_grad_norm=1000")  # fmt: skip
    assert record.last == pytest.approx([3.5, 8.5], rel=1e-3)


@pytest.mark.parametrize(("level", "scale"), [("O1", 65536), ("O2", 32768)])
@pytest.mark.case(16)
def test_clipping_sees_the_true_gradient(tmp_path: Path, level: str, scale: int) -> None:
    record = train(tmp_path, *QUIET, *model_of("zero", lambda info: Scaled(0.0)),
                   *data_of("half_ones", torch.full((1, 1), 0.5), torch.zeros(1, 1)), *PLAIN_SGD, "optimizer.lr=1",
                   "loss=output_mean", "steps=1", "batch.effective=1", "max_grad_norm=1", f"precision={level}",
                   "precision.dtype=float16", f"precision.loss_scale={scale}")  # fmt: skip
    # under O2 the output is fp16, whose largest number is 65504
    assert record.norms == [pytest.approx(0.5)]
    assert record.last == [pytest.approx(-0.5)]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.case(16)
def test_a_window_is_clipped_as_a_whole_under_amp(tmp_path: Path, level: str) -> None:
    record = train(tmp_path, *QUIET, *data_of("clip", *CLIP), "model=linear", "model.init=zeros", "model.bias=false",
                   *PLAIN_SGD, "optimizer.lr=1", "loss=output_mean", "steps=1", "batch.effective=2", "batch.micro=1",
                   "batch.shard=null",
                   "max_grad_norm=0.5", f"precision={level}", "precision.dtype=float16",
                   "precision.loss_scale=1024")  # fmt: skip
    assert record.norms == [pytest.approx(math.sqrt(2), rel=1e-4)]
    assert record.weights[0] == pytest.approx([-0.35355, -0.35355], rel=1e-3)


# -- case 17: what each level means --------------------------------------------------------------------------------------
F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
IMAGES = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LEVELS = {  # weights, batch norm, what the optimizer updates, what the forward gets, autocast, scale, checkpoint
    "fp32": (F32, F32, F32, F32, None, 1, F32),
    "O0": (F32, F32, F32, F32, None, 1, F32),
    "tf32": (F32, F32, F32, F32, None, 1, F32),
    "amp": (F32, F32, F32, F32, F16, 64, F32),
    "O1": (F32, F32, F32, F32, F16, 64, F32),
    "bf16": (F32, F32, F32, F32, B16, 1, F32),
    "O2": (F16, F32, F32, F16, None, 64, F32),
    "bf16_pure": (B16, F32, F32, B16, None, 1, F32),
    "O3": (F16, F16, F16, F16, None, 1, F16),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.case(17)
def test_dtypes_of_a_level(tmp_path: Path, level: str) -> None:
    weights, norm, updated, forward, autocast, scale, saved = LEVELS[level]
    found: dict[str, object] = {}

    class Watched(ConvNorm):
        def forward(self, inputs):
            if self.training:
                found["autocast"] = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            output = super().forward(inputs)
            found["eval dtype" if not self.training else "dtype"] = self.seen
            return output

    def look(state, parts, data):
        module = parts.working.module
        layer = module.norm
        found["weights"] = {module.conv.weight.dtype, module.head.bias.dtype}
        found["norm"] = {layer.weight.dtype, layer.running_mean.dtype, layer.running_var.dtype}
        found["updated"] = {p.dtype for group in state.optimizer.param_groups for p in group["params"]}
        found["scale"], found["scaling"] = state.scaler.get_scale(), state.scaler.is_enabled()
        found["digest"] = weights_sha256(state.model)
        assert state.model.norm.running_mean is layer.running_mean
        if module is not state.model:
            for half, master in parts.working.pairs:
                assert torch.equal(half, master.to(half.dtype)), "weights were not pushed after the update"

    scaling = ("precision.loss_scale=64",) if scale == 64 else ()
    dtype = ("precision.dtype=float16",) if level in ("amp", "O1") else ()
    train(tmp_path, *QUIET, *model_of("watched", lambda info: Watched()),
          *data_of("images", IMAGES, torch.arange(16) % 10, 10), "steps=2", "batch.effective=8", "batch.micro=4",
          "batch.shard=null",
          "eval_every=2", f"precision={level}", *scaling, *dtype, observe=look)  # fmt: skip
    assert found["weights"] == {weights} and found["norm"] == {norm} and found["updated"] == {updated}
    assert found["autocast"] == autocast and found["dtype"] == forward
    assert found["scale"] == scale and found["scaling"] == (scale != 1)
    state = checkpoint.load(tmp_path)
    assert {t.dtype for t in state["model"].values() if t.is_floating_point()} == {saved}
    assert bool(state["scaler"]) == (scale != 1)
    assert summary(tmp_path)["weights_sha256"] == found["digest"]
    assert math.isfinite(rows(tmp_path, "eval/loss")[-1])


@pytest.mark.parametrize(("level", "end"), [("O2", 0.99), ("O3", 1.0), ("bf16_pure", 0.99)])
@pytest.mark.case(17)
def test_masters_move_where_half_weights_stand_still(tmp_path: Path, level: str, end: float) -> None:
    record = train(tmp_path, *QUIET, *model_of("one", lambda info: Scaled(1.0)),
                   *data_of("ones", torch.ones(1, 1), torch.zeros(1, 1)), *PLAIN_SGD, "optimizer.lr=1e-4",
                   "loss=output_mean", "steps=100", "log_every=100", "eval_every=100", "batch.effective=1",
                   f"precision={level}", *(["precision.loss_scale=1024"] if level == "O2" else []))  # fmt: skip
    assert record.last[-1] == pytest.approx(end, abs=2e-6) and (level != "O3" or record.last[-1] == 1.0)
