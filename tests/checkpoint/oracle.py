"""Python's side of the tests of checkpoint files.

  oracle.py rewrite IN OUT       checks IN's SHA-256s, loads it, as a careful user would, and saves it again
  oracle.py make FOLDER          writes files of the kinds that Python programs write
  oracle.py train STEPS FOLDER   continues the training of FOLDER/KIND.pt, for each kind of optimizer
"""
import argparse
import collections
import enum
import hashlib
import json
import math
import os
import sys
import zipfile

import torch
from torch import nn


def load(path):
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 0):
        return torch.load(path, weights_only=True)
    return torch.load(path)


def check_digests(path):
    """As docs/checkpoints.md defines them."""
    def sha256(content):
        return hashlib.sha256(content).digest()

    def of_record(content):
        parts = [content[i:i + 16384] for i in range(0, len(content), 16384)]
        return sha256(b"".join(sha256(part) for part in parts)) if len(parts) > 1 else sha256(content)

    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        records = json.loads(archive.read("archive/lockstep/manifest.json"))["records"]
        assert [r["name"] for r in records] == [n[len("archive/"):] for n in archive.namelist()[:-1]]
        for record in records:
            content = archive.read("archive/" + record["name"])
            assert (record["size"], record["sha256"]) == (len(content), of_record(content).hex()), record


def rewrite(source, target):
    check_digests(source)
    value = load(source)
    assert type(value) is dict, type(value)
    torch.save(value, target)


class BasicBlock(nn.Module):
    """As in torchvision's resnet18, with its names."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def resnet18(width):
    net = nn.Module()
    net.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    for i in range(4):
        inputs, outputs = width * 2 ** max(i - 1, 0), width * 2**i
        blocks = [BasicBlock(inputs, outputs, 1 if i == 0 else 2), BasicBlock(outputs, outputs, 1)]
        setattr(net, f"layer{i + 1}", nn.Sequential(*blocks))
    net.fc = nn.Linear(width * 8, 10)
    return net


class TiedTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 2,
                                             enable_nested_tensor=False)
        self.decoder = nn.Linear(8, 20, bias=False)
        self.decoder.weight = self.embedding.weight


class Color(enum.Enum):
    RED = 1


class AttributeDict(dict):
    """As Lightning's, which holds hyperparameters."""


def make(folder):
    torch.manual_seed(3)
    at = lambda name: os.path.join(folder, name)
    net = resnet18(4)
    torch.save(net.state_dict(), at("resnet18.pt"))
    torch.save(collections.OrderedDict(("module." + k, v) for k, v in net.state_dict().items()), at("through_ddp.pt"))
    torch.save(TiedTransformer().state_dict(), at("tied.pt"))

    first, second = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizer = torch.optim.AdamW([{"params": first.parameters(), "lr": 0.1},
                                   {"params": second.parameters(), "lr": 0.01, "weight_decay": 0.5}], amsgrad=True)
    (second(first(torch.ones(4, 2)))).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), at("groups.pt"))

    lightning = {
        "epoch": 3,
        "global_step": 1200,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": first.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 4, "completed": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.25), "best_k_models": {}}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"base_lrs": [0.1], "last_epoch": 3, "_step_count": 4}],
        "hparams_name": "args",
        "hyper_parameters": AttributeDict(lr=0.5, name="first", color=Color.RED),
        "namespace": argparse.Namespace(batch_size=32),
    }
    torch.save(lightning, at("lightning.ckpt"))

    values = {
        "none": None, "true": True, "small": -5, "large": 2**40, "huge": 2**100, "negative": -(2**70), "float": 0.1,
        "inf": math.inf, "text": "gr\u00fc\u00dfe", "bytes": b"\x00\xff\x80", "bytearray": bytearray(b"ab"),
        "list": [1, [2, []]], "tuple": (1, ("a",)), "set": {7}, "empty": (), "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16, "device": torch.device("cuda", 1), "parameter": nn.Parameter(torch.ones(2)),
        "default": collections.defaultdict(int, {"a": 1}), "counter": collections.Counter("aab"),
        1: "integer key", (1, 2): "tuple key",
        "scalar": torch.tensor(4.0), "no elements": torch.zeros(0, 3), "transposed": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(3).half(), "complex": torch.tensor([1 + 2j]), "flags": torch.tensor([True, False]),
        "same": [1] * 3,
    }
    row = torch.arange(10.0)
    values["row"], values["part of row"], values["row again"] = row, row[2:5], row
    values["expanded"] = torch.ones(1).expand(1000)
    try:
        import numpy
        values["numpy"] = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
        values["fortran"] = numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))
        values["numpy float"] = numpy.float64(0.5)
        values["numpy unsigned"] = numpy.uint64(2**64 - 1)
    except ImportError:
        pass
    for protocol in (2, 4, 5):
        torch.save(values, at(f"values{protocol}.pt"), pickle_protocol=protocol)
    torch.save({"a": torch.ones(2)}, at("legacy.pt"), _use_new_zipfile_serialization=False)
    torch.save({"sparse": torch.eye(3).to_sparse()}, at("sparse.pt"))

    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("mean", torch.tensor([5.0]))

        def forward(self, x):
            return self.fc(x) - self.mean
    torch.jit.script(Scripted()).save(at("script.pt"))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def train_all(steps, folder):
    for kind in OPTIMIZERS:
        train(kind, int(steps), os.path.join(folder, kind + ".pt"), os.path.join(folder, kind + ".further.pt"))


def train(kind, steps, source, target):
    checkpoint = load(source)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model.load_state_dict(checkpoint["model"])
    optimizer = OPTIMIZERS[kind](model.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    for step in range(checkpoint["step"], checkpoint["step"] + steps):
        x = torch.sin(torch.arange(24, dtype=torch.float64) + step).view(6, 4)
        y = torch.cos(torch.arange(18, dtype=torch.float64) * (step + 1)).view(6, 3)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "step": checkpoint["step"] + steps}, target)


if __name__ == "__main__":
    command, arguments = sys.argv[1], sys.argv[2:]
    {"rewrite": rewrite, "make": make, "train": train_all}[command](*arguments)
