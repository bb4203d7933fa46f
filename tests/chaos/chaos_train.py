"""train.py on a slow machine: CHAOS_STEP_S seconds more for a step, CHAOS_SAVE_S for a save, so that kills find both.

Every process says that it trains, by a file `trains-<pid>` in CHAOS_MARKS after its first step.
With CHAOS_FLIP=N a bit of this process's first gradient of step N is flipped, once.
"""

if __name__ == "__main__":
    import os
    import time
    from pathlib import Path
    from typing import Any

    import torch

    from isobatch.checkpoint import saving
    from isobatch.cli.command import main
    from isobatch.train import loop

    handles: list[Any] = []
    train_step, hash_of = loop.train_step, saving.hash_of

    def flipped(gradient: Any) -> Any:
        handles.pop().remove()
        changed = gradient.clone()
        changed.view(torch.int32).view(-1)[3] ^= 1 << 20
        return changed

    def slow_step(state: Any, parts: Any, *args: Any, **more: Any) -> Any:
        time.sleep(float(os.environ["CHAOS_STEP_S"]))
        if state.step + 1 == int(os.environ.get("CHAOS_FLIP", "0")):
            handles.append(next(parts.working.module.parameters()).register_hook(flipped))
        found = train_step(state, parts, *args, **more)
        Path(os.environ["CHAOS_MARKS"], f"trains-{os.getpid()}").touch()
        return found

    def slow_save(path: Any) -> Any:
        time.sleep(float(os.environ["CHAOS_SAVE_S"]))
        return hash_of(path)

    if "CHAOS_MARKS" in os.environ:
        loop.train_step, saving.hash_of = slow_step, slow_save
    main()
