"""train.py with standin.run_job in place of the real one."""

if __name__ == "__main__":
    import importlib
    import os
    import signal
    import sys
    import time

    from isobatch import launch
    from isobatch.cli.command import main
    from isobatch.launch import parent

    if "STANDIN_WATCHES" in os.environ:  # a file that appears when this process looks after its parent
        watch = parent.end_with_parent
        parent.end_with_parent = lambda: (watch(), open(os.environ["STANDIN_WATCHES"], "w").close())
    if "STANDIN_LATE" in os.environ:
        time.sleep(float(os.environ["STANDIN_LATE"]) * int(os.environ.get("RANK", "0")))
    if "STANDIN_EARLY" in os.environ:  # a signal, when this function is called
        signum, place = os.environ.pop("STANDIN_EARLY").split()
        module, name = importlib.import_module(place.partition(":")[0]), place.partition(":")[2]
        function, lost = getattr(module, name), "STANDIN_LOST" in os.environ

        class Raises:
            def __del__(self):
                signal.raise_signal(int(signum))

        def early(*given):
            Raises() if lost else signal.raise_signal(int(signum))
            return function(*given)

        setattr(module, name, early)
    launch.job.TARGET = "standin_ranks:run_job" if "parallel=ddp" in sys.argv else "standin:run_job"
    main()
