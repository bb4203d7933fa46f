"""Where every sample of a tar lies: looked up once and kept in a small file, so that any sample is one read at a known place.

The convention is WebDataset's: members that share a name up to its first dot are one sample, what follows is what they are
(`n01/cat.7.jpg` is the `7.jpg` of `n01/cat`). Nothing is unpacked, and nothing that could run code is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from isobatch.data.files import Names
from isobatch.errors import ConfigError

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp")
LABELS = ("cls", "json", "txt")
PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
BLOCK = 512  # a tar's unit; its end is marked by a block of zeros
VERSION = 2


@dataclass(frozen=True)
class Members:
    """Which members of a sample are read: `image` and `label` are extensions, null = the first known one that is there.

    labelled: a sample without a label is refused; else nobody asks for labels.
    """

    image: str | None = None
    label: str | None = None
    label_key: str = "label"  # in a json
    labelled: bool = True

    def as_kept(self) -> list[Any]:
        return [self.image, self.label, self.label_key] if self.labelled else [self.image]


@dataclass(frozen=True)
class TarIndex:
    """
    Args:
        offsets, sizes: (N,) int64, bytes of each sample's image in the tar.
        names: of the image members. labels: of the samples, as text.
    """

    offsets: Any
    sizes: Any
    names: Names
    labels: Names

    def __len__(self) -> int:
        return len(self.offsets)


def index_of(tar: Path, key: str, members: Members, cache_dir: str | None) -> TarIndex:
    """The index of one tar: the kept one if it is still true, else made and kept. `key`: the setting to name in a refusal.

    Raises:
        ConfigError: the tar is cut off, damaged, compressed, or its samples cannot be used.
    """
    header = {"version": VERSION, **_state(tar), "members": members.as_kept()}
    places = _places(tar, cache_dir, "" if members.labelled else ".images")
    for place in places:
        kept = _read(place, header)
        if kept is not None:
            return kept
    index = scan(tar, key, members)
    for place in places:
        if _write(place, header, index):
            return index
    raise ConfigError("data.cache_dir", cache_dir, f"the index of {tar} can be written neither beside it nor to {places[-1]}",
                      "set data.cache_dir to a folder that can be written")  # fmt: skip


def _state(tar: Path) -> dict[str, int]:
    status = tar.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _places(tar: Path, cache_dir: str | None, kind: str = "") -> list[Path]:
    """Where the index may lie, in order: the folder that was asked for, or beside the tar and then the user's cache."""
    name = f"{tar.name}{kind}.index.safetensors"  # of images alone beside that of labelled ones: neither replaces the other
    cache = Path(cache_dir) if cache_dir else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isobatch"
    unique = cache / f"{hashlib.sha256(os.path.abspath(tar).encode()).hexdigest()[:16]}-{name}"
    return [unique] if cache_dir else [tar.with_name(name), unique]


def scan(tar: Path, key: str, members: Members) -> TarIndex:
    """Go through the headers of `tar`. See index_of."""

    def refuse(problem: str, way_out: str = "make the tar anew") -> ConfigError:
        return ConfigError(key, tar, problem, way_out)

    samples: dict[str, dict[str, tuple[int, int, str]]] = {}  # in the tar's order, members of a sample wherever they are
    with tar.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
                    folder, base = posixpath.split(member.name)
                    if not member.isreg() or base.startswith(".") or "." not in base:
                        continue
                    stem, kind = base.split(".", 1)
                    parts, kind = samples.setdefault(posixpath.join(folder, stem), {}), kind.lower()
                    if kind in parts:
                        raise refuse(f"holds {member.name} twice")
                    parts[kind] = (member.offset_data, member.size, member.name)
                end = archive.offset
        except tarfile.TarError as error:
            begin = _bytes(file, 0, 6)
            if begin[:2] == b"\x1f\x8b" or begin in (b"\xfd7zXZ\0", b"BZh91A") or begin[:4] == b"\x28\xb5\x2f\xfd":
                raise refuse("is compressed, so a sample cannot be read by its place", "decompress it (gunzip)") from None
            raise refuse(f"is cut off or damaged ({error})", "copy or make it anew") from None
        mark = _bytes(file, end, BLOCK)
        if len(mark) < BLOCK:  # which tarfile takes for an end, as it does what follows
            raise refuse(f"ends after {len(samples)} samples without a tar's end mark, so it was probably cut off",
                         "copy or make it anew; if it is complete, `head -c 1024 /dev/zero >> FILE` adds the mark")  # fmt: skip
        if mark.strip(b"\0"):
            raise refuse(f"is damaged at byte {end} (after {len(samples)} samples)", "copy or make it anew")
        return _chosen(file, samples, members, refuse)


def _chosen(file: BinaryIO, samples: dict[str, dict[str, tuple[int, int, str]]], members: Members, refuse: Any) -> TarIndex:
    import numpy

    images = (members.image,) if members.image else IMAGES
    labels = (members.label,) if members.label else LABELS
    places, names, found = [], [], []
    for sample, parts in samples.items():
        image = next((parts[kind] for kind in images if kind in parts), None)
        if image is None:
            continue  # a note beside the samples
        if not members.labelled:
            places.append(image[:2])
            names.append(image[2])
            found.append("0")
            continue
        label = next((kind for kind in labels if kind in parts), None)
        if label is None:
            pickled = next((kind for kind in parts if kind in PICKLED), None)
            held = "no label" if pickled is None else f"only {sample}.{pickled}, a pickle, which can run code and is not read"
            raise refuse(f"has {held} for {image[2]} (looked for {', '.join(labels)})",
                         "write labels as .cls, .txt or .json members, or set data.label_member")  # fmt: skip
        start, size, name = parts[label]
        text = _label(_bytes(file, start, size), label, members.label_key)
        if text is None:
            below = f" under {members.label_key!r} (data.label_key)" if label == "json" else ""
            raise refuse(f"{name} holds no label{below}", "write one line of text or a number")
        places.append(image[:2])
        names.append(image[2])
        found.append(text)
    if not places:
        kinds = sorted({kind for parts in samples.values() for kind in parts})
        shown = f"it has {', '.join(kinds[:6])} members" if kinds else "it is empty"
        raise refuse(f"holds no image ({', '.join(images)}): {shown}", "set data.image_member, or leave the tar out")
    offsets, sizes = numpy.array(places, dtype=numpy.int64).T
    return TarIndex(offsets.copy(), sizes.copy(), Names.of(names), Names.of(found))


def _label(data: bytes, kind: str, key: str) -> str | None:
    """The text of a label; None when there is none."""
    try:
        text = data.decode("utf-8").strip()
        if kind.rsplit(".", 1)[-1] == "json":
            value = json.loads(text)
            value = value.get(key) if isinstance(value, dict) else value
            text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    except ValueError:
        return None
    return text if text and "\n" not in text else None


def _bytes(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _write(place: Path, header: dict[str, Any], index: TarIndex) -> bool:
    """Complete or not at all, whoever else writes it; False when this folder cannot be written."""
    import numpy
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    arrays = {"offsets": index.offsets, "sizes": index.sizes}
    for key, texts in (("names", index.names), ("labels", index.labels)):
        arrays |= {key: numpy.frombuffer(texts.blob, dtype=numpy.uint8), f"{key}_ends": texts.ends}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, part, metadata={"tar": json.dumps(header)})
        part.replace(place)
    except (OSError, SafetensorError):
        with suppress(OSError):  # where the folder is a file, looking for the part is an error too
            part.unlink(missing_ok=True)
        return False
    return True


def _read(place: Path, header: dict[str, Any]) -> TarIndex | None:
    """None when there is none, or it is damaged, or of another state of the tar or other members.

    Several threads read at once, which numpy's own format does not bear: its header is parsed by `ast`, and CPython 3.11
    counts the depth of that for all threads in one number (SystemError: recursion depth mismatch).
    """
    import numpy
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(place, framework="numpy") as kept:
            if json.loads((kept.metadata() or {}).get("tar", "null")) != header:
                return None
            texts = [Names(kept.get_tensor(key).tobytes(), kept.get_tensor(f"{key}_ends")) for key in ("names", "labels")]
            index = TarIndex(kept.get_tensor("offsets"), kept.get_tensor("sizes"), *texts)
    except (OSError, ValueError, SafetensorError):
        return None
    fits = all(len(t.ends) == len(index) and t.ends[-1] == len(t.blob) and (numpy.diff(t.ends) >= 0).all() for t in texts)
    inside = (index.offsets >= 0).all() and (index.sizes >= 0).all() and (index.offsets + index.sizes <= header["size"]).all()
    return index if len(index) and len(index.sizes) == len(index) and fits and inside else None
