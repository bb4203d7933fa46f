"""Where W&B finds its server, its key and its mode, read without importing it.

The same places in the same order as wandb itself: environment, netrc, then the settings files that `wandb login` and
`wandb offline` write. A key that is found is never returned to anything that prints or saves.
"""

from __future__ import annotations

import configparser
import netrc
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_URL = "https://api.wandb.ai"
NAMES = {"dryrun": "offline", "run": "online", "shared": "online"}  # of modes, in older versions


@dataclass(frozen=True)
class Access:
    """
    Attributes:
        mode: online, offline or disabled. Online still needs a server that answers.
        why: what to say of a mode that nobody asked for, else empty.
    """

    mode: str
    base_url: str
    why: str = ""


def resolve(mode: str) -> Access:
    """What `logger.mode` comes to on this machine. A mode in the environment or W&B's settings decides under `auto`."""
    url = base_url()
    if mode != "auto":
        return Access(mode, url)
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return Access("disabled", url)
    asked = os.environ.get("WANDB_MODE") or settings().get("mode", "")
    asked = NAMES.get(asked, asked)
    if asked in ("offline", "disabled"):
        return Access(asked, url)
    if find_key() is None:
        return Access("offline", url, "no key found (`wandb login` or WANDB_API_KEY)")
    return Access("online", url)


def base_url() -> str:
    return (os.environ.get("WANDB_BASE_URL") or settings().get("base_url") or DEFAULT_URL).rstrip("/")


def find_key() -> str | None:
    """The key, or the path of the identity token that stands for it; None if there is neither."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(name):
            return os.environ[name]
    return _netrc_key(base_url()) or settings().get("api_key") or settings().get("identity_token_file")


def redacted(text: str) -> str:
    """`text` without the key, should the library have quoted it."""
    key = find_key()
    return text.replace(key, "(key)") if key else text


def settings() -> dict[str, str]:
    """W&B's settings files, the one of the working folder over the user's."""
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    found: dict[str, str] = {}
    for file in (home / "settings", Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error, OSError, UnicodeError):
            parser.read(file, encoding="utf-8")
            if parser.has_section("default"):
                found.update(parser["default"])
    return found


def _netrc_key(url: str) -> str | None:
    named = os.environ.get("NETRC")
    files = [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        with suppress(OSError, netrc.NetrcParseError, UnicodeError):
            entry = netrc.netrc(file).authenticators(urlsplit(url).netloc)
            if entry and entry[2]:
                return entry[2]
    return None
