"""train.py with standin.run_job in place of the real one."""

if __name__ == "__main__":
    import sys

    from isobatch import launch
    from isobatch.cli import main

    launch.job.TARGET = "standin_ranks:run_job" if "parallel=ddp" in sys.argv else "standin:run_job"
    main()
