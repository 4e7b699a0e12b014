# The scenarios of oracle_scenarios.h by Python's DistributedDataParallel:
#   ddp_oracle.py RANK SIZE FOLDER DEVICE
# DEVICE is cpu, for gloo and float64, or cuda:0, for NCCL and float32. For each scenario, every rank writes parameters and
# buffers as float64, one after the other, to FOLDER/NAME.RANK.
import sys
from array import array
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

RANK, SIZE, FOLDER, DEVICE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], torch.device(sys.argv[4])
DTYPE = torch.float32 if DEVICE.type == "cuda" else torch.float64
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


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 12)
        self.third = nn.Linear(12, 4)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6, sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens)))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def inputs_of(step, sample, dtype):
    seeded = generator(1000 + 10 * step + RANK)
    return torch.randn((BATCH, *sample), generator=seeded, dtype=torch.float64).to(DEVICE, dtype)


def image_of(step, dtype=DTYPE):
    return inputs_of(step, (1, 6, 6), dtype)


def targets_of(step):
    return torch.randint(0, 4, (BATCH,), generator=generator(5000 + 10 * step + RANK)).to(DEVICE)


def filled(model, dtype=DTYPE):
    seeded = generator(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded, dtype=torch.float64) * 0.3)
    return model.to(DEVICE, dtype)


def zero(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def result(model):
    return list(model.parameters()) + [b for name, b in model.named_buffers() if not name.endswith("num_batches_tracked")]


def loss(output, step):
    return nn.functional.cross_entropy(output, targets_of(step))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def train(model, make_optimizer, dtype=DTYPE, hook=None, **options):
    ddp = DistributedDataParallel(model, **options)
    if hook:
        ddp.register_comm_hook(None, hook)
    optimizer = make_optimizer(ddp.parameters())
    for step in range(STEPS):
        zero(model)
        loss(ddp(image_of(step, dtype)), step).backward()
        optimizer.step()
    return result(model)


def plain(make_optimizer, dtype=DTYPE, hook=None, **options):
    return train(filled(ConvNet(), dtype), make_optimizer, dtype, hook, **options)


def sync_batch_norm():
    return train(nn.SyncBatchNorm.convert_sync_batchnorm(filled(ConvNet())), momentum)


def sgd():
    return plain(momentum, torch.float32)


def adam():
    return plain(lambda parameters: torch.optim.Adam(parameters, lr=0.01))


def bucket_view():
    return plain(momentum, gradient_as_bucket_view=True)


def fp16():
    return plain(momentum, torch.float32, fp16_compress_hook)


def two_heads(heads_of, **options):
    model = filled(TwoHeads())
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step % 4 != 3:  # in the other steps gradients add up
            zero(model)
        loss(ddp(inputs_of(step, (6,), DTYPE), *heads_of(step)), step).backward()
        optimizer.step()
    return result(model)


def unused():
    return two_heads(lambda step: ((step + RANK) % 2 == 0, step % 3 == 0), find_unused_parameters=True)


def static_graph():
    return two_heads(lambda step: (True, False), static_graph=True)


def no_sync():
    model = filled(ConvNet())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(STEPS):
        with ddp.no_sync() if step % 3 != 2 else nullcontext():
            loss(ddp(image_of(step)), step).backward()
        if step % 3 == 2:
            optimizer.step()
            zero(model)
    return result(model)


def sparse():
    model = filled(Tokens())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss(ddp(targets_of(step) * 2 + RANK), step).backward()
        optimizer.step()
    return result(model)


def gan():
    maker, critic = filled(nn.Linear(6, 6)), filled(Mlp())
    ddp_maker, ddp_critic = DistributedDataParallel(maker), DistributedDataParallel(critic)
    maker_optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for step in range(STEPS):
        fake = ddp_maker(inputs_of(step, (6,), DTYPE))
        zero(critic)
        loss(ddp_critic(fake.detach()), step).backward()
        critic_optimizer.step()
        zero(maker)
        critic.requires_grad_(False)
        (-loss(critic(fake), step)).backward()  # Python's wrapper expects gradients of a frozen model, too
        critic.requires_grad_(True)
        maker_optimizer.step()
    return result(maker) + result(critic)


def uneven(divide_by_initial_world_size):
    model = filled(ConvNet())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(3 + 2 * ((RANK + 1) % SIZE)):
            zero(model)
            loss(ddp(image_of(step)), step).backward()
            optimizer.step()
    return result(model)


def join():
    return uneven(True)


def join_by_current():
    return uneven(False)


def main():
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    dist.init_process_group(
        "nccl" if DEVICE.type == "cuda" else "gloo",
        init_method=f"file://{FOLDER}/store",
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(minutes=1),
    )
    scenarios = [sgd, adam, bucket_view, fp16, unused, static_graph, no_sync, gan, join, join_by_current]
    if DEVICE.type == "cpu":
        scenarios.append(sparse)
    if DEVICE.type == "cuda":
        scenarios.append(sync_batch_norm)
    for scenario in scenarios:
        flat = torch.cat([tensor.detach().double().flatten() for tensor in scenario()])
        with open(f"{FOLDER}/{scenario.__name__}.{RANK}", "wb") as file:
            array("d", flat.tolist()).tofile(file)
    dist.barrier()
    dist.destroy_process_group()


main()
