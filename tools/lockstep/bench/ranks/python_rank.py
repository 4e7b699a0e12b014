"""One rank of PyTorch's DistributedDataParallel over Gloo, started by `lockstep bench ddp --against python`.

    python_rank.py STORE RANK RANKS mkldnn|no-mkldnn CORES

Prints an empty line when all ranks are connected, and another one after each request on stdin:

    model NAME OPTIMIZER    creates this model
    reset                   restores its initial weights
    train STEPS             trains it
    check                   fails if the parameters of the ranks differ
"""

import os
import sys

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 32
CLASSES = 10
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def linear_layers(*widths):
    layers = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.ReLU(), nn.Linear(before, after)]
    return layers[1:]


def convolution(from_channels, to_channels):
    return [nn.Conv2d(from_channels, to_channels, 3, padding=1), nn.BatchNorm2d(to_channels), nn.ReLU(), nn.MaxPool2d(2)]


def make_model(name):
    """The layers of make_model in ddp_training.cpp."""
    if name == "small":
        return nn.Sequential(*linear_layers(784, 128, 128, CLASSES))
    if name == "mlp":
        return nn.Sequential(*linear_layers(784, 2048, 2048, 2048, CLASSES))
    if name == "cnn":
        layers = convolution(1, 32) + convolution(32, 64) + [nn.Flatten()] + linear_layers(3136, 128, CLASSES)
        return nn.Sequential(*layers)
    raise ValueError(f"unknown model {name}")


class Training:
    def __init__(self, rank, name, optimizer):
        model = make_model(name)
        self.model = DistributedDataParallel(model)
        self.optimizer = OPTIMIZERS[optimizer](model.parameters())
        self.state = [*model.parameters(), *model.buffers()]
        self.first = [tensor.detach().clone() for tensor in self.state]
        torch.manual_seed(rank)
        self.input = torch.randn(BATCH, *((1, 28, 28) if name == "cnn" else (784,)))
        self.target = torch.randint(CLASSES, (BATCH,))

    def reset(self):
        with torch.no_grad():
            for tensor, first in zip(self.state, self.first):
                tensor.copy_(first)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.model(self.input), self.target).backward()
            self.optimizer.step()

    def check(self):
        sums = torch.stack([tensor.detach().view(torch.int32).sum() for tensor in self.model.parameters()])
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise RuntimeError("the parameters of PyTorch's ranks differ")


def main(store, rank, ranks, mkldnn, cores):
    answers = os.dup(1)
    os.dup2(2, 1)  # other output must not mix with the answers
    rank, ranks = int(rank), int(ranks)
    torch.backends.mkldnn.enabled = mkldnn == "mkldnn"
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    dist.barrier()  # connects
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))  # this thread, not Gloo's threads
    os.write(answers, b"\n")
    training = None
    for line in iter(sys.stdin.readline, ""):
        command, *argument = line.split()
        if command == "model":
            training = Training(rank, *argument)
        elif command == "reset":
            training.reset()
        elif command == "train":
            training.train(*map(int, argument))
        elif command == "check":
            training.check()
        os.write(answers, b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
