# The scenarios of oracle_test.cpp by Python's DistributedDataParallel:
#   ddp_oracle.py RANK SIZE FOLDER
# For each, rank 0 writes parameters and buffers as float64, one after the other, to FOLDER/NAME.
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 20, 5


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 3 * 3, 4)

    def forward(self, x):
        return self.head(torch.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)

    def forward(self, x, use_left, use_right):
        x = torch.tanh(self.body(x))
        y = x.narrow(1, 0, 4)
        if use_left:
            y = y + self.left(x)
        if use_right:
            y = y + self.right(x)
        return y


def generator(seed):
    return torch.Generator().manual_seed(seed)


def inputs_of(step, rank, sample, dtype):
    return torch.randn((BATCH, *sample), generator=generator(1000 + 10 * step + rank), dtype=torch.float64).to(dtype)


def targets_of(step, rank):
    return torch.randint(0, 4, (BATCH,), generator=generator(5000 + 10 * step + rank))


def filled(model, dtype):
    seeded = generator(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded, dtype=torch.float64) * 0.3)
    return model.to(dtype)


def zero(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def result(model):
    return list(model.parameters()) + [b for name, b in model.named_buffers() if not name.endswith("num_batches_tracked")]


def loss(output, step, rank):
    return nn.functional.cross_entropy(output, targets_of(step, rank))


def plain(rank, size, dtype, make_optimizer):
    model = filled(ConvNet(), dtype)
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(ddp.parameters())
    for step in range(STEPS):
        zero(model)
        loss(ddp(inputs_of(step, rank, (1, 6, 6), dtype)), step, rank).backward()
        optimizer.step()
    return result(model)


def sgd(rank, size):
    return plain(rank, size, torch.float32, lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9))


def adam(rank, size):
    return plain(rank, size, torch.float64, lambda p: torch.optim.Adam(p, lr=0.01))


def unused(rank, size):
    model = filled(TwoHeads(), torch.float64)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step % 4 != 3:  # in the other steps gradients add up
            zero(model)
        output = ddp(inputs_of(step, rank, (6,), torch.float64), (step + rank) % 2 == 0, step % 3 == 0)
        loss(output, step, rank).backward()
        optimizer.step()
    return result(model)


def no_sync(rank, size):
    model = filled(ConvNet(), torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(STEPS):
        with ddp.no_sync() if step % 3 != 2 else nullcontext():
            loss(ddp(inputs_of(step, rank, (1, 6, 6), torch.float64)), step, rank).backward()
        if step % 3 == 2:
            optimizer.step()
            zero(model)
    return result(model)


def uneven(rank, size, divide_by_initial_world_size):
    model = filled(ConvNet(), torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(3 + 2 * ((rank + 1) % size)):
            zero(model)
            loss(ddp(inputs_of(step, rank, (1, 6, 6), torch.float64)), step, rank).backward()
            optimizer.step()
    return result(model)


def join(rank, size):
    return uneven(rank, size, True)


def join_by_current(rank, size):
    return uneven(rank, size, False)


def main():
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for scenario in (sgd, adam, unused, no_sync, join, join_by_current):
        tensors = scenario(rank, size)
        if rank == 0:
            flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
            with open(f"{folder}/{scenario.__name__}", "wb") as file:
                file.write(bytes(flat.numpy().tobytes()))
    dist.barrier()


main()
