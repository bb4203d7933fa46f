"""The parts of the ladder: loss scaling, half copies, what is refused, how often the host waits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import mean_probe, plain, rows, summary, train
from precision_probes import PLAIN_SGD, QUIET, ConvNorm, Scaled, data_of, model_of
from torch import nn

from isobatch import config
from isobatch.ema import Ema
from isobatch.errors import ConfigError, JobFailed
from isobatch.optimizer import HALF_EPS, protect_eps
from isobatch.precision import TABLE, Autocast, MasterWeights, PureHalf
from isobatch.precision.masters import HalfCopy, HalfModel, convert, to_fp32
from isobatch.precision.scaling import PATIENCE, LossScaler

CPU = torch.device("cpu")
LEVELS = ("fp32", "O0", "tf32", "amp", "O1", "bf16", "O2", "O3", "bf16_pure")


# -- what is refused -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (("precision=O1", "precision.keep_batchnorm_fp32=true"), "keep_batchnorm_fp32", "under autocast all weights are fp32"),
        (("precision=O2", "precision.keep_batchnorm_fp32=false"), "keep_batchnorm_fp32", "precision=O3"),
        (("precision=bf16", "precision.loss_scale=1024"), "loss_scale", "bf16 has the range of fp32"),
        (("precision=bf16_pure", "precision.loss_scale=1024"), "loss_scale", "bf16 has the range of fp32"),
        (("precision=O3", "precision.loss_scale=128"), "loss_scale", "precision=O2"),
        (("precision=O2", "precision.loss_scale=static:zero"), "loss_scale", "is no loss scale"),
        (("precision=O2", "precision.loss_scale=-2"), "loss_scale", "positive"),
        (("precision=O2", "precision.loss_scale=true"), "loss_scale", "is no loss scale"),
        (("precision=O2", "precision.loss_scale=0.5"), "loss_scale", "min_loss_scale"),
        (("precision=O2", "precision.dtype=float32"), "dtype", "float16, bfloat16"),
        (("precision=amp", "precision.growth_factor=1"), "growth_factor", "above 1"),
        (("precision=amp", "precision.growth_factor=nan"), "growth_factor", "above 1"),
        (("precision=amp", "precision.growth_interval=0"), "growth_interval", "positive"),
        (("precision=fp32", "+precision.dtype=float16"), "dtype", "no such option"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_in_words(words: tuple[str, ...], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config.load(plain(*words))
    assert refusal.value.key == f"precision.{key}" and reason in str(refusal.value)


# -- what a level says of itself ------------------------------------------------------------------------------------------
def test_every_level_says_what_it_is() -> None:
    said = {level: config.load(plain(f"precision={level}")).precision.describe(CPU) for level in LEVELS}
    assert said["fp32"] == said["O0"] == "fp32"
    assert said["amp"] == said["O1"]
    assert said["amp"].startswith("fp32 weights, bfloat16 autocast, no loss scale (fp16 is for CUDA")
    assert said["O2"] == "float16 copy of fp32 master weights, dynamic loss scale from 65536"
    assert said["bf16_pure"] == "bfloat16 copy of fp32 master weights, no loss scale"
    assert said["O3"].startswith("pure float16")
    assert Autocast(dtype="float16", loss_scale="static:128").describe(CPU).endswith("loss scale 128")


def test_half_compute_decides_about_channels_last() -> None:
    cuda = torch.device("cuda")
    halves = [level for level in LEVELS if config.load(plain(f"precision={level}")).precision.half_compute(cuda)]
    assert halves == ["amp", "O1", "bf16", "O2", "O3", "bf16_pure"]


def test_autocast_asked_for_a_scale_uses_it_only_with_fp16() -> None:
    """`precision=amp precision.loss_scale=1024` is one setting for every machine; bf16 has no use for it."""
    assert not Autocast(loss_scale=1024).scaler(CPU).is_enabled()
    assert Autocast(loss_scale=1024, dtype="float16").scaler(CPU).get_scale() == 1024
    assert not MasterWeights(dtype="bfloat16").scaler(CPU).is_enabled()
    assert not PureHalf().scaler(CPU).is_enabled()


# -- the scale -----------------------------------------------------------------------------------------------------------
def weight_with_gradient(gradient: float) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([gradient])
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_the_scale_moves_as_torchs_does() -> None:
    ours = LossScaler(64.0, growth_interval=3)
    torchs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for gradient in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0):
        weights = []
        for scaler in (ours, torchs):
            weight, optimizer = weight_with_gradient(gradient * scaler.get_scale())
            scaler.scale(torch.ones(1))
            scaler.unscale_(optimizer)
            applied = scaler.step(optimizer)
            if scaler is torchs:
                scaler.update()
            else:
                assert applied == math.isfinite(gradient)
            weights.append(weight.item())
        assert weights[0] == weights[1]
        state = torchs.state_dict()
        assert ours.state_dict() == {key: state[key] for key in ("scale", "_growth_tracker")}


def test_a_static_scale_stays_and_withholds_and_gives_up() -> None:
    scaler = LossScaler(8.0, dynamic=False, growth_interval=1)
    for gradient, applied in ((8.0, True), (math.inf, False), (8.0, True)):
        weight, optimizer = weight_with_gradient(gradient)
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer) is applied and scaler.get_scale() == 8
        assert weight.item() == -applied
    for _ in range(PATIENCE - 1):
        _, optimizer = weight_with_gradient(math.nan)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    _, optimizer = weight_with_gradient(math.nan)
    scaler.unscale_(optimizer)
    with pytest.raises(JobFailed, match=f"after {PATIENCE} withheld"):
        scaler.step(optimizer)


def test_an_update_is_withheld_on_request_with_and_without_scaling() -> None:
    for scaler in (LossScaler(None), LossScaler(4.0)):
        weight, optimizer = weight_with_gradient(1.0)
        scaler.unscale_(optimizer)
        assert not scaler.step(optimizer, withhold=True) and weight.item() == 0
    assert scaler.get_scale() == 2 and LossScaler(None).state_dict() == {}


@pytest.mark.parametrize(("words", "waits"), [
    (("precision=fp32",), 0), (("precision=bf16",), 0), (("precision=bf16_pure",), 0), (("precision=O3",), 0),
    (("precision=amp", "precision.dtype=float16"), 1), (("precision=O2",), 1),
])  # fmt: skip
def test_the_host_waits_for_the_device_as_rarely_as_can_be(tmp_path: Path, monkeypatch, words, waits: int) -> None:
    counted: list[str] = []
    for name in ("item", "__bool__", "__float__", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, o=original, n=name: (counted.append(n), o(self, *a))[1])
    from isobatch.train import loop

    original_step, seen = loop.train_step, []

    def counting(*args, **kwargs):
        before = len(counted)
        result = original_step(*args, **kwargs)
        seen.append(len(counted) - before)
        return result

    monkeypatch.setattr(loop, "train_step", counting)
    from isobatch import run
    from isobatch.runtime.distributed import Ranks

    run.run_job(plain(*QUIET, *model_of("conv_norm", lambda info: ConvNorm()), "data=random_matrix",
                      *data_of("eight", torch.randn(8, 1, 8, 8), torch.arange(8), 10), "steps=3", "log_every=100",
                      "eval_every=100", "batch.effective=8", "ema=ema", *words), tmp_path, Ranks())  # fmt: skip
    assert seen[:2] == [waits, waits]


# -- half copies ---------------------------------------------------------------------------------------------------------
def test_a_half_copy_shares_batch_norm_and_collects_gradients_in_fp32() -> None:
    model = ConvNorm()
    copy = HalfCopy(model, torch.float16)
    assert copy.module.norm is model.norm and copy.module.conv is not model.conv
    assert [(h.dtype, m.dtype) for h, m in copy.pairs] == [(torch.float16, torch.float32)] * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        copy.module(torch.randn(4, 1, 8, 8)).sum().backward()
    assert copy.module.head.bias.grad.dtype == torch.float32
    copy.pull_gradients()
    assert model.head.bias.grad.tolist() == [8.0] * 10 and copy.module.head.bias.grad is None
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    before = copy.module.head.bias.clone()
    optimizer.step()
    copy.push_weights()
    assert torch.equal(copy.module.head.bias, model.head.bias.half()) and not torch.equal(copy.module.head.bias, before)
    copy.zero_grad(optimizer)
    assert all(p.grad is None for p in (*model.parameters(), *copy.module.parameters()))


def test_many_shards_do_not_lose_their_gradients_to_rounding(tmp_path: Path) -> None:
    """2048 + 1 is 2048 in fp16: a window whose gradients collected in half would miss its last shards."""
    inputs = torch.ones(8, 1)
    inputs[0] = 2048.0
    record = train(tmp_path, *QUIET, *model_of("none", lambda info: Scaled(0.0)),
                   *data_of("uneven", inputs, torch.zeros(8, 1)), *PLAIN_SGD, "optimizer.lr=1", "loss=output_sum",
                   "steps=1", "batch.effective=8", "batch.micro=1",
                   "batch.shard=null", "precision=O2", "precision.loss_scale=static:1",
                   "eval_every=100")  # fmt: skip
    assert record.last == [-(2048 + 7) / 8]


def test_memory_per_parameter_of_master_weights() -> None:
    """fp32 with Adam holds 16 bytes per parameter, O2 18: the half weights come on top, the half gradients do not stay."""
    model = nn.Linear(64, 64)
    count = sum(p.numel() for p in model.parameters())
    copy = HalfCopy(model, torch.float16)
    optimizer = torch.optim.AdamW(model.parameters())
    copy.module(torch.randn(4, 64)).sum().backward()
    copy.pull_gradients()
    optimizer.step()
    tensors = [*model.parameters(), *copy.module.parameters(), *(p.grad for p in model.parameters()),
               *(p.grad for p in copy.module.parameters() if p.grad is not None),
               *(t for s in optimizer.state.values() for t in s.values() if t.numel() > 1)]  # fmt: skip
    assert sum(t.numel() * t.element_size() for t in tensors) / count == 18


def test_pure_half_keeps_batch_norm_on_request_and_casts_by_itself() -> None:
    model = HalfModel(ConvNorm(), torch.float16, keep_batchnorm_fp32=True).module
    assert model.norm.weight.dtype == model.norm.running_var.dtype == torch.float32
    assert model.conv.weight.dtype == torch.float16
    assert model(torch.randn(4, 1, 8, 8)).dtype == torch.float32 and model.seen == torch.float16


def test_the_average_of_half_weights_is_fp32_and_moves() -> None:
    model = HalfModel(Scaled(1.0), torch.float16, False).module
    average = Ema(decay=0.999, warmup=False).build(model)
    with torch.no_grad():
        model.w.fill_(0.5)
    for update in range(1000):
        average.update(model, step=update + 2)
    assert average.module.w.dtype == torch.float32
    assert average.module.w.item() == pytest.approx(0.5 + 0.5 * 0.999**1000, rel=1e-4)
    assert average.module(torch.ones(1, 1)).item() == pytest.approx(average.module.w.item())


def test_eps_is_protected_for_fp16_weights_alone(caplog) -> None:
    for dtype, eps in ((torch.float16, HALF_EPS), (torch.bfloat16, 1e-8), (torch.float32, 1e-8)):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, dtype=dtype)), nn.Parameter(torch.zeros(2, dtype=dtype))])
        with caplog.at_level("INFO"):
            protect_eps(optimizer)
        assert optimizer.param_groups[0]["eps"] == eps
    assert caplog.text.count("eps raised") == 1


def test_o3_with_adamw_stays_finite_where_gradients_underflow(tmp_path: Path) -> None:
    record = train(tmp_path, *QUIET, *model_of("tiny", lambda info: Scaled(1.0)),
                   *data_of("tiny", torch.full((1, 1), 1e-4), torch.zeros(1, 1)), "optimizer=adamw", "optimizer.lr=0.01",
                   "optimizer.weight_decay=0", "loss=output_mean", "steps=3", "batch.effective=1",
                   "precision=O3")  # fmt: skip
    assert all(math.isfinite(weight) for weight in record.last) and record.last[-1] < 1.0


def test_casts_reach_into_containers() -> None:
    half = torch.ones(1, dtype=torch.float16)
    assert to_fp32({"a": [half, (half,)]})["a"][1][0].dtype == torch.float32
    assert convert((torch.ones(1), torch.ones(1, dtype=torch.int64)), torch.float16)[1].dtype == torch.int64


def test_nonfinite_skip_and_a_scaler_get_along(tmp_path: Path) -> None:
    train(tmp_path, *mean_probe([1, 1e20, 3]), "precision=amp", "precision.dtype=float16", "precision.loss_scale=1024",
          "batch.effective=1", "on_nonfinite=skip")  # fmt: skip
    assert rows(tmp_path, "train/loss_scale") == [1024, 512, 512]
    assert summary(tmp_path)["skipped_steps"] == 1


def test_table_and_presets() -> None:
    assert sorted(TABLE) == ["autocast", "full", "half", "master"]
