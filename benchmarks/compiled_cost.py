"""The models of compiled_cost.cpp, for `lockstep compile`, and its Python sides.

    compiled_cost.py STORE RANK RANKS    answers each line on stdin with an empty line on stdout:

    model NAME eager|compile    creates the model; compile: with its loss by torch.compile
    train eager|compile STEPS   trains the last model of this kind
"""

import os
import sys

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

BATCH, CLASSES = 32, 10
ALPHABET, CONTEXT, WIDTH, HEADS, LAYERS, TEXTS = 256, 64, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(attended)
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.output = nn.Linear(WIDTH, ALPHABET)

    def forward(self, tokens):
        positions = torch.arange(CONTEXT, device=tokens.device)
        return self.output(self.blocks(self.tokens(tokens) + self.positions(positions))).flatten(0, 1)


def make_mlp():
    widths = (784, 2048, 2048, 2048)
    layers = [part for pair in zip(widths, widths[1:]) for part in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(2048, CLASSES))
    return model, (torch.randn(BATCH, 784), torch.randint(CLASSES, (BATCH,))), F.cross_entropy


def make_cnn():
    def convolution(before, after):
        return nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)

    model = nn.Sequential(
        *convolution(1, 32), *convolution(32, 64), nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )
    return model, (torch.randn(BATCH, 1, 28, 28), torch.randint(CLASSES, (BATCH,))), F.cross_entropy


def make_gpt():
    tokens = torch.randint(ALPHABET, (TEXTS, CONTEXT))
    return Gpt(), (tokens, torch.randint(ALPHABET, (TEXTS * CONTEXT,))), F.cross_entropy


class Training:
    def __init__(self, name, kind, ranks):
        module, (self.data, self.target), loss = globals()["make_" + name]()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        if ranks > 1:
            module = nn.parallel.DistributedDataParallel(module)
        self.loss_of = lambda data, target: loss(module(data), target)
        if kind == "compile":
            self.loss_of = torch.compile(self.loss_of)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            self.loss_of(self.data, self.target).backward()
            self.optimizer.step()


def main(store, rank, ranks):
    answers = os.dup(1)
    os.dup2(2, 1)  # other output must not mix with the answers
    rank, ranks = int(rank), int(ranks)
    torch.manual_seed(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    trainings = {}
    for line in iter(sys.stdin.readline, ""):
        command, *words = line.split()
        if command == "model":
            trainings[words[1]] = Training(*words, ranks)
        else:
            trainings[words[0]].train(int(words[1]))
        os.write(answers, b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
