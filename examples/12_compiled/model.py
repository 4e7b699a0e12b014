"""The model of compiled.cpp: a small transformer that predicts the next character of a text.

    lockstep compile model.py:make -o model.pt2
"""

import torch
from torch import nn
from torch.nn import functional as F

ALPHABET, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 256, 64, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x):
        x = x + self.projection(self.attend(self.norm1(x)))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.character, self.position = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.output = nn.Linear(WIDTH, ALPHABET)

    def forward(self, characters):
        positions = torch.arange(CONTEXT, device=characters.device)
        return self.output(self.blocks(self.character(characters) + self.position(positions)))


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make():
    torch.manual_seed(1)
    characters = torch.randint(ALPHABET, (BATCH, CONTEXT + 1))
    return Transformer(), (characters[:, :-1], characters[:, 1:]), loss
