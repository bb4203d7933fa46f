"""train.py with standin.run_job in place of the real one."""

if __name__ == "__main__":
    from isobatch import launch
    from isobatch.cli import main

    launch.job.TARGET = "standin:run_job"
    main()
