"""What a run looks at so that a promise that cannot hold is said, and not broken without a word."""
