"""The state of the pretended machine: which storage is on which device, who has written and read it, what was noticed."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pretended.streams import Stream

REAL_DEVICE = torch.Tensor.device  # the getter, before anything is patched
CPU = torch.device("cpu")
OURS = "machine", "watch", "tensors", "streams", "names", "replicas", "kernels"
NOT_A_CALLER = (*(f"/pretended/{name}.py" for name in OURS), "/torch/",
                "<frozen", "/contextlib.py", "<string>", "/weakref.py")  # fmt: skip


class Place:
    """What is known of one storage.

    device: None = main memory. pinned: may be copied from and to without waiting. open: made by torch's own C++, which
    takes the device of tensors that are the CPU's there; the first device that it meets is its own.
    home: the stream whose pool the allocator took it from; recorded: streams the allocator was told of; users: other
    streams that have used it -> (their time, line). written: (stream, its time). sent: (stream, its time) of the latest
    copy from here to a device, for pinned memory.
    """

    __slots__ = ("alive", "device", "home", "nbytes", "open", "pinned", "recorded", "sent", "users", "written")

    def __init__(self, alive: Any, nbytes: int):
        self.alive, self.nbytes = alive, nbytes
        self.device: torch.device | None = None
        self.pinned = self.open = False
        self.home: Stream | None = None
        self.recorded: set[Stream] = set()
        self.users: dict[Stream, tuple[int, str]] = {}
        self.written: tuple[Stream, int] | None = None
        self.sent: tuple[Stream, int] | None = None


class Local(threading.local):
    """Of each thread: its current device, and the streams it has entered."""

    def __init__(self) -> None:
        self.current = 0
        self.entered: list[Stream] = []
        self.opening = False


class Machine:
    """
    Attributes that tests look at:
        syncs: (what, file:line) -> how often the host waited for a device there.
        faults: (what, file:line) -> how often something was done that goes wrong on some days on a real device.
        launches: operator -> how often it started work on a device.
        streams: how many were made besides the default ones.
        dead: set to an error's text, it is what everything on a device raises from then on, as after a failed assertion.

    Args:
        devices: how many there are. memory: bytes of each; None: as many as wanted.
    """

    def __init__(self, devices: int, memory: int | None = None):
        from pretended.names import Generator

        self.devices, self.memory = devices, memory
        self.shown: list[int] | None = None  # the devices that were visible when CUDA started
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[tuple[str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.streams, self.dead = 0, ""
        self.local = Local()
        self.places: dict[int, Place] = {}
        self.defaults: dict[int, Stream] = {}
        self.all_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.registered: dict[int, int] = {}  # address -> bytes of page-locked memory
        self.own_generators: dict[int, Any] = {}
        self.generators = [Generator(torch.device("cuda", i)).manual_seed(0) for i in range(devices)]
        self.allocated, self.peak = [0] * devices, [0] * devices

    # -- which devices there are -----------------------------------------------------------------------------------
    def visible(self) -> list[int]:
        """The devices that CUDA shows, in its order: as CUDA_VISIBLE_DEVICES says, which counts when it starts."""
        if self.shown is not None:
            return self.shown
        asked = os.environ.get("CUDA_VISIBLE_DEVICES")
        return list(range(self.devices)) if asked is None else [int(i) for i in asked.split(",") if i and int(i) < self.devices]

    @property
    def count(self) -> int:
        return len(self.visible())

    def start(self) -> None:
        self.shown = self.visible()

    # -- what a test asks ------------------------------------------------------------------------------------------
    def forget(self) -> None:
        """Begin to count anew."""
        self.syncs.clear(), self.faults.clear(), self.launches.clear()

    @property
    def started(self) -> int:
        """All launches."""
        return sum(self.launches.values())

    def waits_in(self, part: str) -> int:
        """How often the host waited in files whose path contains `part`."""
        return sum(n for (_, where), n in self.syncs.items() if part in where)

    # -- storages --------------------------------------------------------------------------------------------------
    def place(self, tensor: Any, make: bool = False) -> Place | None:
        try:
            storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key = storage._cdata
        found = self.places.get(key)
        if found is None and make:
            found = Place(weakref.ref(storage, lambda _, key=key: self._freed(key)), storage.nbytes())
            self.places[key] = found
        return found

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        place = self.place(tensor)
        return place.device if place is not None and place.device is not None else REAL_DEVICE.__get__(tensor)

    def pinned(self, tensor: torch.Tensor) -> Place | None:
        """What is known of `tensor` if it is page-locked: by torch's allocator, or registered with the driver."""
        place = self.place(tensor)
        if place is None or not place.pinned:
            address = tensor.untyped_storage().data_ptr()
            if not any(start <= address < start + size for start, size in self.registered.items()):
                return None
            place = self.place(tensor, make=True)
            assert place is not None
            place.pinned = True
        return place

    def generator_device(self, generator: Any) -> torch.device:
        own = self.own_generators.get(generator._cdata)
        return CPU if own is None else own.device

    def on_gpu(self, tensor: torch.Tensor) -> bool:
        return self.device_of(tensor).type == "cuda"

    def settle(self, place: Place, device: torch.device, stream: Stream) -> None:
        """`place` is on `device` from now on, written by what `stream` does now."""
        self.start()
        if device.index >= self.count:
            raise torch.AcceleratorError(f"CUDA error: invalid device ordinal ({device.index} of {self.count})")
        place.device, place.open, place.home, place.written = device, False, stream, (stream, stream.time)
        self.grow(place, place.nbytes)

    def grow(self, place: Place, nbytes: int) -> None:
        """Count `nbytes` more on the device of `place`.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        assert place.device is not None
        i = place.device.index
        if self.memory is not None and self.allocated[i] + nbytes > self.memory:
            place.device = None
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB. GPU {i} has a total capacity of "
                f"{self.memory / 2**20:.2f} MiB of which {(self.memory - self.allocated[i]) / 2**20:.2f} MiB is free."
            )
        self.allocated[i] += nbytes
        self.peak[i] = max(self.peak[i], self.allocated[i])

    def _freed(self, key: int) -> None:
        place = self.places.pop(key, None)
        if place is None or place.device is None:
            return
        self.allocated[place.device.index] -= place.nbytes
        for stream, (time, where) in place.users.items():
            if stream is not place.home and stream not in place.recorded and place.home.knows.get(stream, 0) < time:
                self.faults["freed while another stream may still use it: no record_stream", where] += 1

    # -- streams ---------------------------------------------------------------------------------------------------
    def index_of(self, device: Any) -> int:
        if device is None:
            return self.local.current
        if isinstance(device, int):
            return device if device >= 0 else self.local.current
        device = torch.device(device)
        return self.local.current if device.index is None else device.index

    def stream(self, device: Any = None) -> Stream:
        """The current one of this thread on `device`."""
        from pretended.streams import Stream

        index = self.index_of(device)
        for stream in reversed(self.local.entered):
            if stream.device.index == index:
                return stream
        if index not in self.defaults:
            self.defaults[index] = Stream(index, counted=False)
        return self.defaults[index]

    def check_alive(self) -> None:
        if self.dead:
            raise torch.AcceleratorError(self.dead)

    def waits(self, why: str, device: Any = None, times: int = 1) -> None:
        """The host waits for the current stream of `device`."""
        self.check_alive()
        self.syncs[why, caller()] += times
        self.stream(device).arrive()

    def wait_all(self, why: str, device: Any = None) -> None:
        self.waits(why, device)
        for stream in list(self.all_streams):
            if stream.device.index == self.index_of(device):
                stream.arrive()


def caller() -> str:
    """The innermost line that is neither torch's nor ours: path from src/ or tests/ on, and line number."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in NOT_A_CALLER):
            short = name.rsplit("/src/", 1)[-1].rsplit("/tests/", 1)[-1]
            return f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


_HERE: list[Machine] = []


def here() -> Machine:
    """The machine that is pretended now."""
    return _HERE[-1]
