"""Trains the network of examples/02_fashion_mnist with PyTorch's own DistributedDataParallel over Gloo, on CPUs, and
writes the same metrics.jsonl. With the same seed, the two runs can be compared record by record.

    python3 benchmarks/convergence/train.py --ranks 2 --run runs/python --epochs 5 --seed 1

The program starts its ranks itself. A process that has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set is one rank.

--norm batch   BatchNorm2d of each rank's own batch; rank 0's running statistics are used (default)
--norm sync    batch normalization over all ranks; torch.nn.SyncBatchNorm itself is for GPUs only
--norm none    no normalization
"""

import argparse
import gzip
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_with_gradient
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


class SyncBatchNorm2d(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        count = torch.tensor(float(x.numel() // x.size(1)))
        dist.all_reduce(count)
        mean = dist_with_gradient.all_reduce(x.sum([0, 2, 3])) / count
        centered = x - mean.view(1, -1, 1, 1)
        variance = dist_with_gradient.all_reduce(centered.square().sum([0, 2, 3])) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centered * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


NORMS = {"batch": nn.BatchNorm2d, "sync": SyncBatchNorm2d, "none": nn.Identity}


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False)
        self.norm1 = norm(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm2 = norm(32)
        self.hidden = nn.Linear(32 * 7 * 7, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.output(x)


def read_idx(path):
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return torch.frombuffer(bytearray(content[4 + 4 * dimensions :]), dtype=torch.uint8).view(sizes)


def read_dataset(folder, split):
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz").unsqueeze(1).to(torch.float32).div_(255)
    targets = read_idx(folder / f"{split}-labels-idx1-ubyte.gz").to(torch.int64)
    return TensorDataset(images, targets)


class MetricLog:
    def __init__(self, folder, every=10):
        self.every = every
        self.steps = self.epochs = 0
        self.window = torch.zeros(2, dtype=torch.float64)
        self.epoch_sums = torch.zeros(2, dtype=torch.float64)
        self.began = time.monotonic()
        self.file = None
        if dist.get_rank() == 0:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            self.file = open(pathlib.Path(folder) / "metrics.jsonl", "w", buffering=1)

    def end_step(self, loss, samples, lr, steps_per_epoch):
        self.steps += 1
        self.window += torch.tensor([loss * samples, samples], dtype=torch.float64)
        step_of_epoch = self.steps - self.epochs * steps_per_epoch
        if step_of_epoch % self.every == 0 or step_of_epoch == steps_per_epoch:
            dist.all_reduce(self.window)
            self.epoch_sums += self.window
            self.write("step", round(self.steps / steps_per_epoch, 6), loss=self.mean(self.window), lr=lr)
            self.window.zero_()

    def end_epoch(self, accuracy):
        self.epochs += 1
        self.write("epoch", self.epochs, loss=self.mean(self.epoch_sums), accuracy=accuracy)
        self.epoch_sums.zero_()

    def mean(self, sums):
        return sums[0].item() / sums[1].item()

    def write(self, kind, epoch, **metrics):
        if self.file:
            seconds = round(time.monotonic() - self.began, 3)
            record = {"type": kind, "step": self.steps, "epoch": epoch, "seconds": seconds, **metrics}
            self.file.write(json.dumps(record) + "\n")


def test_accuracy(net, test_set):
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)
    images, targets = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in test_set.tensors)
    right = torch.zeros(1, dtype=torch.int64)
    net.eval()
    with torch.no_grad():
        for batch, target in zip(images.split(500), targets.split(500)):
            right += net(batch).argmax(1).eq(target).sum()
    net.train()
    dist.all_reduce(right)
    return right.item() / len(test_set)


def train(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_set = read_dataset(args.data, "train")
    test_set = read_dataset(args.data, "t10k")

    torch.manual_seed(args.seed)
    net = Net(NORMS[args.norm])
    ddp = DistributedDataParallel(net)

    sampler = DistributedSampler(train_set, seed=args.seed, shuffle=True)
    batches = BatchSampler(sampler, args.batch, drop_last=False)
    loader = DataLoader(train_set, sampler=batches, batch_size=None)

    max_lr = 0.1 * args.batch * dist.get_world_size() / 128
    optimizer = torch.optim.SGD(ddp.parameters(), lr=max_lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=args.epochs * len(loader))

    metrics = MetricLog(args.run)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            metrics.end_step(loss.item(), len(images), optimizer.param_groups[0]["lr"], len(loader))
        accuracy = test_accuracy(net, test_set)
        metrics.end_epoch(accuracy)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  test accuracy {100 * accuracy:.2f} %", flush=True)
    dist.destroy_process_group()


def first_failure(ranks):
    return next((rank.returncode for rank in ranks if rank.poll()), 0)


def start_ranks(count):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(count):
        variables = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    try:
        while any(rank.poll() is None for rank in ranks) and not first_failure(ranks):
            time.sleep(0.1)
        return first_failure(ranks)
    finally:
        for rank in ranks:
            rank.terminate()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--run", required=True, help="folder for metrics.jsonl")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="per rank")
    parser.add_argument("--norm", choices=NORMS, default="batch")
    parser.add_argument("--data", type=pathlib.Path, default="/usr/share/datasets/fashion-mnist")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    if "RANK" in os.environ:
        train(arguments)
    else:
        sys.exit(start_ranks(arguments.ranks))
