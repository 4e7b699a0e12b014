# The training of parity_test.cpp by Python's DistributedDataParallel. Writes rank 0's parameters and running statistics
# as float64, one after the other, to FOLDER/result.
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS, BATCH = 8, 5


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 3 * 3, 4)

    def forward(self, x):
        return self.head(torch.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def main():
    rank, size, optimizer_name, dtype_name, folder = sys.argv[1:]
    rank, size, dtype = int(rank), int(size), getattr(torch, dtype_name)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)

    model = ConvNet()
    seeded = generator(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded, dtype=torch.float64) * 0.3)
    model.to(dtype)
    ddp = nn.parallel.DistributedDataParallel(model)
    if optimizer_name == "adam":
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    for step in range(STEPS):
        data = torch.randn((BATCH, 1, 6, 6), generator=generator(1000 + 10 * step + rank), dtype=torch.float64).to(dtype)
        target = torch.randint(0, 4, (BATCH,), generator=generator(5000 + 10 * step + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(data), target).backward()
        optimizer.step()

    if rank == 0:
        tensors = list(model.parameters()) + [model.norm.running_mean, model.norm.running_var]
        flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
        with open(f"{folder}/result", "wb") as file:
            file.write(bytes(flat.numpy().tobytes()))
    dist.barrier()


main()
