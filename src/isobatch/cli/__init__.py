"""The command: what was typed, and every ending's words and exit code."""

__all__ = ["main"]


def main() -> None:
    """Entry point of train.py and of the console script. (The import waits: it tells Hydra which version's rules hold.)"""
    from isobatch.runtime import garbage

    garbage.off()  # until run_job, or a verb's main
    from isobatch.cli import command

    command.main()
