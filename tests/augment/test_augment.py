"""Augmentation: bound to the sample, shapes and dtypes kept, mixing bound to the shard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BASE, train, train_ranks
from pictures import photo
from PIL import Image

from isobatch.augment.mixing import ShardMixer
from isobatch.augment.sample import SampleTransform, posterize, shifted, timm_policy
from isobatch.config import options
from isobatch.data import DataInfo, Split
from isobatch.data.device import ToDevice
from isobatch.data.feed import Request
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import Samples
from isobatch.errors import ConfigError
from isobatch.runtime.randomness import seed_of, seed_sample
from isobatch.shards.layout import Lanes

EVERYTHING = {"flip": 0.5, "erase": 1.0, "color_jitter": 0.4, "vflip": 0.5, "jitter_prob": 0.7, "grey": 0.4, "blur": 0.5,
              "erase_mode": "rand", "erase_count": 2}  # fmt: skip
RECIPES = ["simple", "randaugment", "autoaugment", "augmix"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_augmented_file_depends_on_its_seed_alone(tmp_path: Path, recipe: str) -> None:
    for split in ("train", "val"):
        for i in range(4):
            photo(tmp_path / split / "ab"[i // 2] / f"{i}.jpg", (64, 48), seed=i)
    data = options("data", {"name": "image_folder", "root": str(tmp_path), "image_size": 16})
    augment = options("augment", {"name": recipe, **EVERYTHING, "random_interpolation": True})
    split = data.load(augment.sample_transform(data), 0).train

    def read(workers: int, epoch: int, size: int) -> torch.Tensor:
        source = WorkerSource(Samples(split, 3), ToDevice(torch.device("cpu"), None, False), workers)
        requests = (Request(epoch, torch.arange(start, start + size)) for start in range(0, 8, size))
        try:
            return torch.cat([inputs for inputs, _ in source.batches(requests)])
        finally:
            source.close()

    first = read(0, 0, 4)
    assert first.shape == (8, 3, 16, 16)
    assert read(2, 0, 2).equal(first)
    assert not read(0, 1, 4).equal(first), "the second epoch repeats the first"
    assert not first[:4].equal(first[4:]), "a repeat of a sample within an epoch is augmented alike"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("channels", [1, 3])
def test_images_in_memory_keep_shape_dtype_and_range(recipe: str, channels: int) -> None:
    data = options("data", {"name": "synthetic", "in_chans": channels, "image_size": 12})
    transform = options("augment", {"name": recipe, **EVERYTHING}).sample_transform(data)
    assert transform.crop == "pad"
    grey = torch.linspace(-3, 3, 144).view(1, 12, 12).expand(channels, 12, 12)
    outputs = []
    for index in range(6):
        seed_sample(0, 0, index)
        outputs.append(transform(grey))
        seed_sample(0, 0, index)
        assert transform(grey).equal(outputs[-1])
        assert outputs[-1].shape == grey.shape and outputs[-1].dtype == grey.dtype
    assert len({o.sum().item() for o in outputs}) == 6
    pixels = torch.randint(0, 256, (channels, 12, 12), dtype=torch.uint8)
    assert transform(pixels).dtype == torch.uint8


def test_the_parts_of_a_transform() -> None:
    image = torch.arange(12.0).view(1, 3, 4)
    assert SampleTransform(crop="none", flip=1.0)(image).equal(image.flip(2))
    assert shifted(image, 1, -1).tolist() == [[[0, 0, 0, 0], [1, 2, 3, 0], [5, 6, 7, 0]]]
    assert shifted(image, 5, 0).abs().sum() == 0
    erased = SampleTransform(crop="none", flip=0, erase=1.0)(torch.zeros(1, 16, 16))
    assert 0.01 < (erased != 0).double().mean() < 0.45
    crop = SampleTransform(crop="resized", scale=(0.2, 0.5), size=8)
    for width, height in ((64, 48), (10, 300), (7, 7)):
        for _ in range(20):
            left, top, w, h = crop.box(width, height)
            assert left >= 0 and top >= 0 and w > 0 and h > 0 and left + w <= width and top + h <= height
    areas = [w * h / (64 * 48) for _, _, w, h in (crop.box(64, 48) for _ in range(200))]
    assert min(areas) > 0.17 and max(areas) < 0.53
    assert crop(torch.rand(3, 20, 30)).shape == (3, 8, 8)


def test_each_option_does_what_it_says() -> None:
    image = torch.linspace(0, 1, 3 * 16 * 16).view(3, 16, 16)

    def changed(seed: int = 0, **given: Any) -> torch.Tensor:
        seed_sample(0, 0, seed)
        return SampleTransform(crop="none", flip=0, mean=(0.5, 0.4, 0.3), **given)(image)

    assert changed(vflip=1.0).equal(image.flip(1))
    grey = changed(grey=1.0)
    assert grey[0].equal(grey[1]) and grey[0].equal(grey[2])
    assert (changed(blur=1.0) - image).abs().max() > 0.01
    jittered = [not changed(seed, color_jitter=0.5, jitter_prob=0.5).allclose(image, atol=0.01) for seed in range(12)]
    assert 1 < sum(jittered) < 11
    for mode, values in (("const", 1), ("rand", 1), ("pixel", 8)):
        erased = changed(erase=1.0, erase_mode=mode)
        filled = erased[:, (erased != image).all(0)]
        assert filled.shape[1] and len(filled[0].unique()) >= values and (values == 8 or len(filled[0].unique()) == 1), mode
    colours = []
    for count in (1, 4):
        boxes = [changed(seed, erase=1.0, erase_mode="rand", erase_count=count) for seed in range(6)]
        colours.append(max(len(erased[0][(erased != image).all(0)].unique()) for erased in boxes))
    assert colours[0] == 1 < colours[1] <= 4
    ways = {SampleTransform(random_interpolation=True).way() for _ in range(40)}
    assert ways == {"bilinear", "bicubic"} and SampleTransform().way() == "bilinear"


def test_a_blur_fits_into_any_image() -> None:
    for side in (2, 3, 8, 23, 24, 224):
        blurred = SampleTransform(crop="resized", size=side, blur=1.0)(torch.rand(3, 30, 30))
        assert blurred.shape == (3, side, side)


@pytest.mark.parametrize(("values", "key"), [({"jitter_prob": 0.5}, "jitter_prob"), ({"erase_mode": "rand"}, "erase_mode"),
                                             ({"erase_count": 2}, "erase_count")])  # fmt: skip
def test_what_would_do_nothing_is_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"augment\.{key}=.*: says nothing with augment\.\w+=0"):
        options("augment", {"name": "simple", **values})


def test_nothing_is_mixed_towards_the_end() -> None:
    plain_inputs, plain_targets = mixed((0,), (4,), step=7, until=7)
    assert plain_targets.argmax(1).tolist() == [0, 1, 2, 3] and plain_targets.max(1).values.tolist() == [1.0] * 4
    assert plain_inputs[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert mixed((0,), (4,), step=6, until=7)[1].equal(mixed((0,), (4,), step=6)[1])
    off = options("augment", {"name": "simple", "mix_until": "90%"})
    with pytest.raises(ConfigError, match=r"augment\.mix_until=90%: ends a mixing, and nothing is mixed"):
        off.batch_transform(DataInfo("x", (1, 8, 8), 10), 0)
    with pytest.raises(ConfigError, match=r"augment\.random_interpolation=True: is of a resized crop, and this one is pad"):
        options("augment", {"name": "simple", "random_interpolation": True}).sample_transform(
            options("data", {"name": "digits"})
        )


@pytest.mark.timeout(240)
def test_every_plan_augments_and_stops_mixing_alike(tmp_path: Path) -> None:
    words = ("data=digits", "augment=mixup", "augment.mix_until=50%", "augment.vflip=0.5", "augment.grey=0.3",
             "augment.blur=0.5",
             "augment.color_jitter=0.4", "augment.jitter_prob=0.5", "augment.erase=0.5", "augment.erase_mode=rand",
             "augment.erase_count=2", "steps=4", "epochs=null", "log_every=1", "batch.effective=24", "batch.shard=6",
             "reduction=exact", *BASE)  # fmt: skip
    soft: list[bool] = []

    def look(state: Any, parts: Any, window: Any) -> None:
        soft.append(any((m.targets.max(1).values < 1).any().item() for m in window.micro_batches))

    one = train(tmp_path / "one", *words, observe=look)
    assert soft == [True, True, False, False]
    assert train(tmp_path / "six", *words, "batch.micro=6").weights == one.weights
    assert train_ranks(2, tmp_path / "two", *words)[1].weights == one.weights


def mixed(shards: tuple[int, ...], sizes: tuple[int, ...], step: int = 0, **options_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"mixup": 0.5, "cutmix": 1.0, "switch": 0.5, "prob": 1.0, "mode": "batch", **options_}
    mixer = ShardMixer(**given, num_classes=10, seed=0)
    parts = [(torch.arange(9.0).add(10 * v).view(9, 1, 1, 1).repeat(1, 1, 6, 6)[:n], torch.arange(n)) for v, n in
             zip(shards, sizes, strict=True)]  # fmt: skip
    return mixer(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), step, shards, Lanes.alone(sizes))


@pytest.mark.parametrize("mode", ["batch", "elem", "pair"])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_mixing_is_the_shards_own(mode: str, mixup: float, cutmix: float) -> None:
    import numpy

    kind = {"mode": mode, "mixup": mixup, "cutmix": cutmix}
    before = numpy.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    together = mixed((2, 3), (4, 5), **kind)
    alone = [mixed((2,), (4,), **kind), mixed((3,), (5,), **kind)]
    assert numpy.random.get_state()[1].tolist() == before  # type: ignore[index,union-attr]
    for k in (0, 1):
        assert together[k].equal(torch.cat([alone[0][k], alone[1][k]])), "it depends on what else is in the micro batch"
    assert together[1].shape == (9, 10)
    assert together[1].sum(1).tolist() == pytest.approx([1.0] * 9)
    assert not mixed((2,), (4,), step=1, **kind)[1].equal(alone[0][1]), "another step, the same draw"
    assert not mixed((3,), (4,), **kind)[1].equal(alone[0][1]), "another shard, the same draw"


def test_soft_targets_say_what_the_pixels_are_made_of() -> None:
    inputs, targets = mixed((0,), (4,), mixup=0.5, cutmix=0.0)
    # sample i has pixels i and class i: the mean class is the pixel value
    assert inputs[:, 0, 0, 0].tolist() == pytest.approx((targets @ torch.arange(10.0)).tolist(), abs=1e-5)
    inputs, targets = mixed((0,), (4,), mixup=0.0, cutmix=1.0)
    assert inputs.mean((1, 2, 3)).tolist() == pytest.approx((targets @ torch.arange(10.0)).tolist(), abs=1e-5)


@pytest.mark.parametrize("sides", [None, [0.3, 0.6]])
@pytest.mark.parametrize("mode", ["batch", "elem", "pair"])
def test_what_is_mixed_is_what_timm_mixes(mode: str, sides: list[float] | None) -> None:
    """To the bit, with its draws; a shard of odd size is timm's of one less, and the sample in the middle stays as it is."""
    import numpy
    from timm.data import Mixup

    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6)
    mixer = ShardMixer(0.4, 1.0, 0.5, 0.9, mode, 10, seed=3, sides=sides)
    ours = mixer(images.clone(), labels, 1, (2,), Lanes.alone((6,)))
    before = numpy.random.get_state()
    numpy.random.seed(seed_of("mix", 3, 1, 2) % 2**32)
    theirs = Mixup(0.4, 1.0, sides, prob=0.9, switch_prob=0.5, mode=mode, label_smoothing=0.0, num_classes=10)(
        images.clone(), labels
    )
    numpy.random.set_state(before)
    assert ours[0].equal(theirs[0]) and torch.allclose(ours[1], theirs[1])
    if mode == "pair":
        odd = torch.cat([images[:3], torch.ones(1, 3, 8, 8), images[3:]])
        found = mixer(odd.clone(), torch.tensor([0, 1, 2, 9, 3, 4, 5]), 1, (2,), Lanes.alone((7,)))
        assert found[0][3].equal(odd[3]) and found[1][3, 9] == 1
        assert found[0][[0, 1, 2, 4, 5, 6]].equal(ours[0])


def test_mixing_needs_images_with_classes() -> None:
    mix = options("augment", {"name": "simple", "mixup": 0.2})
    with pytest.raises(ConfigError, match=r"augment\.mixup=0\.2: mixes images with classes"):
        mix.batch_transform(DataInfo("rows", (4,)), 0)
    assert options("augment", {"name": "simple"}).batch_transform(DataInfo("x", (1, 8, 8), 10), 0) is None


@pytest.mark.parametrize(
    ("name", "values", "key"),
    [("simple", {"flip": 2}, "flip"), ("simple", {"scale": [0.5, 0.1]}, "scale"), ("simple", {"scale": [0.5]}, "scale"),
     ("simple", {"mixup": -1}, "mixup"), ("simple", {"crop": "five"}, "crop"), ("simple", {"mix_mode": "both"}, "mix_mode"),
     ("simple", {"cutmix_sides": [0.2, 0.8]}, "cutmix_sides"),
     ("simple", {"cutmix": 1, "cutmix_sides": [0.8, 0.2]}, "cutmix_sides"),
     ("randaugment", {"policy": "original"}, "policy"), ("augmix", {"policy": "rand-m9"}, "policy"),
     ("simple", {"ratio": [1, float("inf")]}, "ratio"), ("simple", {"scale": [0.5, float("nan")]}, "scale"),
     *(("randaugment", {"policy": f"rand-{part}"}, "policy") for part in (
         "", "mfoo", "foo", "m9-zz3", "w7", "mnan", "m9.5", "n0", "n-3", "n1000000000", "p5", "mstdinf", "inc3", "tzz", "M9")),
     *(("augmix", {"policy": f"augmix-{part}"}, "policy") for part in ("w0", "w-1", "a0", "w999999999", "d99999999", "n2")),
     ("autoaugment", {"policy": "v0-m9"}, "policy"), ("autoaugment", {"policy": "original-mstdx"}, "policy")],
)  # fmt: skip
def test_options_out_of_range_are_refused(name: str, values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        options("augment", {"name": name, **values})
    assert refusal.value.key == f"augment.{key}"


@pytest.mark.parametrize(
    ("name", "policy"),
    [("randaugment", "rand"), ("randaugment", "rand-m9-n3-mstd0.5-mmax15-inc1-p0.7"), ("randaugment", "rand-mstd101-tweights"),
     ("randaugment", "rand-t3a"), ("augmix", "augmix-m5-w4-d2-b1-a0.5-mstd1"), ("autoaugment", "3a"),
     ("autoaugment", "original-mstd0.5")],
)  # fmt: skip
def test_every_part_that_timm_knows_is_taken(name: str, policy: str) -> None:
    assert options("augment", {"name": name, "policy": policy}).policy_name == policy
    timm_policy(policy, 8, (0.5,), "bilinear")


def test_a_policy_needs_colour_or_grey() -> None:
    with pytest.raises(ConfigError, match="1 or 3 channels, not 4"):
        options("augment", {"name": "randaugment"}).sample_transform(options("data", {"name": "synthetic", "in_chans": 4}))


def test_a_split_in_memory_is_augmented_sample_by_sample() -> None:
    data = options("data", {"name": "digits"})
    transform = options("augment", {"name": "simple", "flip": 0, "padding": 1}).sample_transform(data)
    split: Split = data.load(transform, 0).train
    assert split.tensors is None and split.light
    plain = data.load(None, 0).train
    changed = 0
    for i in range(12):
        seed_sample(0, 0, i)
        image, target = split.dataset[i]
        assert target == plain.dataset[i][1] and image.shape == (1, 8, 8)
        changed += not torch.allclose(image, plain.dataset[i][0], atol=1e-6)
    assert 6 <= changed <= 12  # 8 of 9 shifts move something


@pytest.mark.parametrize("policy", ["rand-m10-n20-inc1", "rand-m20-mmax20-n20-inc1", "v0r", "originalr", "augmix-m10-w9"])
def test_a_policy_at_its_strongest_stops_at_no_image(policy: str) -> None:
    transform = timm_policy(policy, 8, (0.5,), "bilinear")
    picture = Image.new("RGB", (8, 8), (200, 100, 50))
    for index in range(100):
        seed_sample(0, 0, index)
        assert transform(picture).size == (8, 8)


def test_no_bits_are_black_and_eight_are_the_image() -> None:
    picture = Image.new("RGB", (2, 2), (200, 100, 50))
    colors = [posterize(picture, bits).getpixel((0, 0)) for bits in (-1, 0, 1, 8)]
    assert colors == [(0, 0, 0), (0, 0, 0), (128, 0, 0), (200, 100, 50)]


@pytest.mark.slow  # a process of its own
def test_a_policy_brings_timm_without_wandb() -> None:
    code = ("import sys; from isobatch.augment.sample import timm_policy; timm_policy('rand-m9-n2', 32, (0.5,), 'bilinear');"
            "assert 'timm' in sys.modules and 'wandb' not in sys.modules")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
