"""The command: what was typed, and every ending's words and exit code."""

__all__ = ["main"]


def main() -> None:
    """Entry point of train.py and of the console script. (The import waits: it tells Hydra which version's rules hold.)"""
    from isobatch.cli import command

    command.main()
