"""The command: what was typed, and every ending's words and exit code."""

from isobatch.cli.command import main

__all__ = ["main"]
