"""Train: `python train.py --help` shows what can be set. (The import waits: ranks of our own read this file again.)"""

if __name__ == "__main__":
    from isobatch.cli import main

    main()
