"""Where two runs part first: `python -m isobatch.compare RUN RUN...`."""
