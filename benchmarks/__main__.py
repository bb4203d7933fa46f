"""`python benchmarks`: see table.py."""

from table import main

main()
