"""What torch's safe mode still lets a file do, looked for before torch opens it.

`torch.load(weights_only=True)` runs no code, but a file may make it build more than the file holds: the same list copied a
million times, a tensor without data, an archive whose parts lie on top of each other. A state that this program saved needs
none of that, so its archive and the opcodes of its pickle are read here first, and nothing is built.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

from isobatch.checkpoint.folder import Damaged

GROWTH, ALLOWED = 4, 64 << 20  # bytes of memory for a byte of the file, and for any file
RECORD, OBJECT = 1024, 64  # bytes for an entry of the archive, for an opcode of the pickle
# function -> how many arguments it gets: what a tensor is made of, and its (empty) hooks
CALLED = {"torch._utils _rebuild_tensor_v2": 6, "torch._utils _rebuild_tensor_v3": 7, "collections OrderedDict": 0}
NAMES = re.compile(r"torch [A-Z][A-Za-z0-9]*Storage|torch\.storage UntypedStorage"
                   r"|torch (u?int|float|bfloat|complex|bool)[a-z0-9_]*")  # fmt: skip
# opcode -> how many objects it takes from the stack (-1: all down to the mark); what it leaves is said below
TAKES = {"SETITEM": 2, "APPEND": 1, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "BINPERSID": 1, "REDUCE": 2, "TUPLE": -1,
         "SETITEMS": -1, "APPENDS": -1}  # fmt: skip
SCALARS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "NEWTRUE", "NEWFALSE", "NONE", "EMPTY_DICT",
           "EMPTY_LIST", "EMPTY_TUPLE"}  # fmt: skip


def check(path: Path) -> None:
    """Read the archive at `path` as torch.load will.

    Raises:
        Damaged: it is none, or would take more memory than a state of its size does.
    """
    size = path.stat().st_size
    limit = GROWTH * size + ALLOWED
    try:
        if _listed(path, size) * RECORD > limit:
            raise Damaged(f"{path.name} lists more than it holds")
        with zipfile.ZipFile(path) as archive:
            items = archive.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED or item.compress_size != item.file_size for item in items):
                raise Damaged(f"{path.name} is a compressed archive")
            if len({item.filename for item in items}) < len(items):
                raise Damaged(f"{path.name} has two parts of one name")
            # 30: a part's own header; without room for it the parts lie on top of each other
            if sum(item.file_size + 30 for item in items) > size:
                raise Damaged(f"{path.name} claims more bytes than it has")
            pickled = [item for item in items if item.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickled) != 1:
                raise Damaged(f"{path.name} has {len(pickled)} pickles")
            opcodes(archive.read(pickled[0]), limit)
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, struct.error) as error:
        raise Damaged(f"{path.name} is no archive ({type(error).__name__})") from None


def _listed(path: Path, size: int) -> int:
    """How many entries the archive says it has, before anything is made of each. No comment may follow the end record."""
    with path.open("rb") as file:
        file.seek(max(0, size - 98))  # the end record (22), and that of large archives with its locator (56 + 20)
        tail = file.read(98)
    if tail[-22:-18] != b"PK\5\6":
        raise zipfile.BadZipFile
    count: int = struct.unpack("<H", tail[-12:-10])[0]
    if count == 0xFFFF or tail[-42:-38] == b"PK\6\7":
        if tail[:4] != b"PK\6\6":
            raise zipfile.BadZipFile
        count = struct.unpack("<Q", tail[32:40])[0]
    return count


def opcodes(data: bytes, limit: int) -> None:
    """Follow a pickle's opcodes without building anything.

    Raises:
        Damaged: one that a saved state does not need, a function called with something else than what a tensor is made of,
            or objects for more than `limit` bytes.
    """
    stack: list[Any] = []  # per object: a function's name, the number of a tuple's parts, or None
    marks: list[int] = []
    memo: dict[int, Any] = {}
    made = 0
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        made += OBJECT + (len(argument) if isinstance(argument, str) else 0)
        if made > limit:
            raise Damaged("its state has more parts than its size allows")
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1] if stack else None
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(argument))
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "GLOBAL":
            if argument not in CALLED and not NAMES.fullmatch(argument):
                raise Damaged(f"its state names {argument[:60]}")
            stack.append(argument)
        elif name in SCALARS:
            stack.append(0 if name == "EMPTY_TUPLE" else None)
        elif name in TAKES:
            count = TAKES[name] if TAKES[name] >= 0 or not marks else len(stack) - marks.pop()
            if not 0 <= count <= len(stack):
                raise Damaged("its state takes what is not there")
            taken = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            # an OrderedDict made of a list copies it, as often as it is asked to
            if name == "REDUCE" and taken[1] != CALLED.get(taken[0]):
                raise Damaged("its state calls a function that no tensor needs")
            if name.startswith("TUPLE"):
                stack.append(count)
            elif name in ("BINPERSID", "REDUCE"):
                stack.append(None)
        elif name not in ("PROTO", "STOP"):
            raise Damaged(f"its state has the opcode {name}")
