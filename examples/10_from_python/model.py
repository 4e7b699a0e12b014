"""The model of from_python.cpp in Python.

    python3 model.py make model.pt      writes a new model's state_dict and prints the model's loss
    python3 model.py check model.pt     loads a state_dict and prints the model's loss
"""
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.output = nn.Linear(64, 1)

    def forward(self, x):
        return self.output(self.hidden(x)).squeeze(1)


def make(file):
    torch.manual_seed(1)
    torch.save(Net().state_dict(), file)
    check(file)


def check(file):
    net = Net()
    net.load_state_dict(torch.load(file, weights_only=True))
    axis = torch.linspace(-1, 1, 50)
    points = torch.cartesian_prod(axis, axis)
    heights = torch.sin(4 * points[:, 0]) * torch.cos(3 * points[:, 1])
    with torch.no_grad():
        print("loss", nn.functional.mse_loss(net(points), heights).item())


if len(sys.argv) != 3 or sys.argv[1] not in ("make", "check"):
    sys.exit(__doc__)
make(sys.argv[2]) if sys.argv[1] == "make" else check(sys.argv[2])
