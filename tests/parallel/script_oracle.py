"""Saves a TorchScript model, trains it in one process on the batches of two ranks, and saves its state:

  script_oracle.py FOLDER STEPS     writes FOLDER/model.pt and FOLDER/trained.pt
"""
import sys

import torch
from torch import nn

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])
RANKS, BATCH = 2, 5


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.gate = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 4)
        self.register_buffer("offset", torch.linspace(0, 1, 8))

    def forward(self, x):
        x = self.body(x)
        if x.size(0) > 1:  # control flow, which a trace would not keep
            x = x * torch.sigmoid(self.gate(x) + self.offset)
        return self.head(x)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def batch(step):
    inputs = [torch.randn((BATCH, 6), generator=generator(1000 + 10 * step + rank), dtype=torch.float64) for rank in range(RANKS)]
    targets = [torch.randint(0, 4, (BATCH,), generator=generator(5000 + 10 * step + rank)) for rank in range(RANKS)]
    return torch.cat(inputs), torch.cat(targets)


torch.manual_seed(3)
model = torch.jit.script(Gated().double())
model.save(f"{FOLDER}/model.pt")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(STEPS):
    inputs, targets = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
torch.save(dict(model.state_dict()), f"{FOLDER}/trained.pt")
