"""Reading what lies in a run folder. Anybody may have made it, so every reader of one goes through here.

Limits on the type of the file, its size, depth and number of entries come before anything is built from it, so that no
reader hangs or runs out of memory. Nothing read here is resolved or run: `${oc.env:HOME}` stays the text that it is, and
`resolvable` tells it from a value that may become a setting.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from functools import cache
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

SIZE = 1 << 20  # bytes of config.yaml, overrides.yaml, plan.json, summary.json, a line of metrics.jsonl, ...
ENTRIES = {"json": 100_000, "yaml": 20_000}  # keys and values of a file; each takes up to 600 bytes of memory
DEPTH, KEY = 16, 200  # levels; characters of a key: keys are joined to dotted names
DIGITS = 100  # of an integer; Python itself refuses to print one of 4,301
# what plain YAML has; dates, sets, binaries, merges (<<) and everything with a tag of its own are none of ours
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(Exception):
    """A file of a run folder that cannot be used; the text says why, in a few words."""


class Missing(Unreadable):
    """It is not there."""


def read_json(run: Path, name: str, size: int = SIZE, entries: int = ENTRIES["json"]) -> Any:
    """The content of the JSON file RUN/`name`.

    Raises:
        Unreadable: it is missing, damaged, or beyond a limit.
    """
    text = read_text(run, name, size)
    if sum(map(text.count, ",:[{")) > entries:
        raise Unreadable(f"has more than {entries:,} entries")
    try:
        data = json.loads(text, parse_int=_integer)
        _check_tree(data)
        if _SURROGATE.search(text):  # half a character, which nothing could print or write
            str(data).encode()
    except (ValueError, RecursionError) as error:
        raise Unreadable(_damage("JSON", error)) from None
    return data


def read_yaml(run: Path, name: str, size: int = SIZE, entries: int = ENTRIES["yaml"]) -> Any:
    """The content of the YAML file RUN/`name`, numbers as OmegaConf reads them; aliases are refused.

    Raises:
        Unreadable: it is missing, damaged, or beyond a limit.
    """
    import yaml

    text = read_text(run, name, size)
    if sum(map(text.count, "\n,:[{-?")) > entries:
        raise Unreadable(f"has more than {entries:,} entries")
    try:
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            _check_nodes(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise Unreadable(_damage("YAML", error)) from None


def read_mapping(run: Path, name: str) -> dict[str, Any]:
    """The content of RUN/`name` (.json or .yaml), which has to be a mapping whose keys are text.

    Raises:
        Unreadable: it is missing, damaged, beyond a limit or something else.
    """
    data = read_json(run, name) if name.endswith(".json") else read_yaml(run, name)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise Unreadable("is no mapping")
    return data


def usable(run: Path, name: str) -> dict[str, Any] | None:
    """`read_mapping`, for whoever can do without: None where it would refuse."""
    try:
        return read_mapping(run, name)
    except Unreadable:
        return None


def read_text(run: Path, name: str, size: int = SIZE) -> str:
    """The text of RUN/`name`.

    Raises:
        Unreadable: it is missing, no regular file, larger than `size` bytes, or no UTF-8.
    """
    with open_file(run, name, size) as file:
        try:
            data = file.read(size + 1)
        except OSError as error:
            raise Unreadable(f"cannot be read ({error.strerror})") from None
    if len(data) > size:  # it grew
        raise Unreadable(f"is larger than {size:,} bytes")
    try:
        return data.decode("utf-8")
    except ValueError:
        raise Unreadable("is no UTF-8 text") from None


def open_file(run: Path, name: str, size: int | None = None) -> BufferedReader:
    """RUN/`name`, opened for reading bytes. Never waits, as opening a pipe would.

    Raises:
        Unreadable: it is missing, no regular file (nor a link to one), or larger than `size` bytes.
    """
    path = run / name
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: to open a device may do something
            raise Unreadable("is no regular file")
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise Missing("is missing") from None
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a zero in the name; RuntimeError: a ring of links
        raise Unreadable(f"cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})") from None
    file: BufferedReader = BufferedReader(FileIO(number, "rb"))
    found = os.fstat(number)  # of what was opened: it may have changed
    if not stat.S_ISREG(found.st_mode) or (size is not None and found.st_size > size):
        file.close()
        raise Unreadable(f"is larger than {size:,} bytes" if stat.S_ISREG(found.st_mode) else "is no regular file")
    return file


def lines(file: BufferedReader, longest: int = SIZE) -> Iterator[bytes]:
    """The lines of `file`, ends included; of one that is longer than `longest` bytes nothing."""
    whole = True
    while line := file.readline(longest):
        ends = line.endswith(b"\n")
        if whole and (ends or len(line) < longest):
            yield line
        whole = ends


def resolvable(value: Any) -> bool:
    """Whether OmegaConf would replace or miss something in `value` (text, a number, or a list or mapping of these)."""
    if isinstance(value, dict):
        return any(resolvable(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(map(resolvable, value))
    return isinstance(value, str) and ("${" in value or value == "???")


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise Unreadable(f"has a number of more than {DIGITS} digits")
    return int(text)


def _check_tree(data: Any) -> None:
    level = [data]
    for _ in range(DEPTH):
        below: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                _check_keys(map(len, outer))
                below += outer.values()
            elif isinstance(outer, list):
                below += outer
        if not below:
            return
        level = below
    raise Unreadable("is nested too deeply")


def _check_keys(lengths: Iterable[int]) -> None:
    if max(lengths, default=0) > KEY:
        raise Unreadable(f"has a key of more than {KEY} characters")


def _check_nodes(root: Any) -> None:
    """Each node once (an alias makes it come twice), plain tags only, not too deep."""
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    seen: set[int] = set()
    level = [] if root is None else [root]
    for _ in range(DEPTH):
        if not level:
            return
        below: list[Any] = []
        for node in level:
            if id(node) in seen:
                raise Unreadable("has aliases")
            seen.add(id(node))
            if node.tag not in _TAGS:
                raise Unreadable("has a tag that plain data has not")
            if node.tag.endswith(":int") and len(node.value) > DIGITS:
                raise Unreadable(f"has a number of more than {DIGITS} digits")
            if isinstance(node, MappingNode):
                _check_keys(len(key.value) for key, _ in node.value)
                if any(not isinstance(key, ScalarNode) or key.tag.endswith(":null") for key, _ in node.value):
                    raise Unreadable("has a key that is no text")
                below += [part for pair in node.value for part in pair]
            elif isinstance(node, SequenceNode):
                below += node.value
        level = below
    raise Unreadable("is nested too deeply")


@cache
def _loader() -> Any:
    """PyYAML's safe loader, in C where there is one, with OmegaConf's idea of a number: 1e-3 is one, a date is text."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    kept = {first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":float", ":timestamp"))]
            for first, found in Loader.yaml_implicit_resolvers.items()}  # fmt: skip
    Loader.yaml_implicit_resolvers = kept
    number = (r"^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)"
              r"|\.[0-9_]+(?:[eE][-+][0-9]+)?|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(?:inf|Inf|INF)"
              r"|\.(?:nan|NaN|NAN))$")  # fmt: skip
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(number), list("-+0123456789."))
    return Loader


def _damage(kind: str, error: BaseException) -> str:
    """In a few words, without the file's own text: it may be somebody else's file."""
    line = getattr(getattr(error, "problem_mark", None), "line", None)
    at = line + 1 if line is not None else getattr(error, "lineno", None)
    return f"is no {kind}" + (f" (line {at})" if at else "")
