"""train.py on a slow machine: CHAOS_STEP_S seconds more for a step, CHAOS_SAVE_S for a save, so that kills find both.

Every process says that it trains, by a file `trains-<pid>` in CHAOS_MARKS after its first step.
"""

if __name__ == "__main__":
    import os
    import time
    from pathlib import Path
    from typing import Any

    from isobatch.checkpoint import saving
    from isobatch.cli.command import main
    from isobatch.train import loop

    train_step, hash_of = loop.train_step, saving.hash_of

    def slow_step(*args: Any, **more: Any) -> Any:
        time.sleep(float(os.environ["CHAOS_STEP_S"]))
        found = train_step(*args, **more)
        Path(os.environ["CHAOS_MARKS"], f"trains-{os.getpid()}").touch()
        return found

    def slow_save(path: Any) -> Any:
        time.sleep(float(os.environ["CHAOS_SAVE_S"]))
        return hash_of(path)

    if "CHAOS_MARKS" in os.environ:
        loop.train_step, saving.hash_of = slow_step, slow_save
    main()
