"""A small GPT on the lines of Python's own reference, letter by letter. Lines are padded; the loss is a mean over letters."""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import isobatch

CONTEXT = 64  # letters of a line; always padded to it, so that no bit depends on who shares a batch
LETTERS = 96  # ASCII from the blank on, and the end of a line
PAD = -100  # what torch's losses leave out


class Lines:
    """A line -> (its letters but the last, its letters but the first). Every tenth line is for the evaluation."""

    num_classes = LETTERS

    def __init__(self, split: str, lines: int | None = None):
        text = [line.strip()[:CONTEXT] for topic in sorted(topics) for line in topics[topic].splitlines()]
        text = [line for line in text if len(line) > 16 and line.isascii() and line.isprintable()][:lines]
        self.lines = [line for i, line in enumerate(text) if (i % 10 == 9) == (split == "eval")]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        letters = torch.tensor([*self.lines[index].encode(), 32 + LETTERS - 1]) - 32
        return letters[:-1], letters[1:]


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(samples, CONTEXT) twice."""
    inputs = [functional.pad(x, (0, CONTEXT - len(x))) for x, _ in samples]
    targets = [functional.pad(y, (0, CONTEXT - len(y)), value=PAD) for _, y in samples]
    return torch.stack(inputs), torch.stack(targets)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # padding is behind every letter that counts
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """(N, CONTEXT) letters -> (N, LETTERS, CONTEXT) scores of the next ones."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 64, depth: int = 2, heads: int = 4):
        super().__init__()
        self.letters, self.places = nn.Embedding(num_classes, width), nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.letters(letters) + self.places)).transpose(1, 2)


isobatch.register("data", "lines", Lines)
isobatch.register("collate", "padded", padded)
isobatch.register("model", "gpt", GPT)
