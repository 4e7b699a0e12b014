"""Saves and loads checkpoints with torch.save and torch.load; started by `lockstep bench checkpoint --against python`.

    checkpoint_side.py PLAN

PLAN is a CheckpointPlan as JSON. Prints one line of JSON when the state is created, then answers each line on stdin with
a line of JSON:

    save FILE   the seconds of torch.save, with the same durability as lockstep's: fsync of the file, rename, fsync of
                the folder
    load FILE   the seconds of torch.load, and the number of wrong tensors
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time

import torch
from torch import nn

STEPS = 1000
IS_WEIGHTS_ONLY = int(torch.__version__.split(".")[0]) >= 2  # 1.13 has it, but refuses dicts of plain values


def make_tensor(sizes, index):
    """The values of make_saved_tensor in checkpoint_state.cpp."""
    tensor = torch.empty(sizes)
    flat = tensor.view(-1)
    flat.copy_(torch.arange(flat.numel(), dtype=torch.int32).remainder_(4093))
    flat.mul_(1 / 4096).add_(index)
    return tensor


class State:
    """CheckpointState in checkpoint_state.h."""

    def __init__(self, parameters):
        self.model = nn.Module()
        for index, (name, sizes) in enumerate(parameters):
            self.model.register_parameter(name, nn.Parameter(make_tensor(sizes, index)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        count = len(parameters)
        for index, parameter in enumerate(self.model.parameters()):
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(STEPS)),
                "exp_avg": make_tensor(parameter.shape, count + index),
                "exp_avg_sq": make_tensor(parameter.shape, 2 * count + index),
            }

    def value(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def count_wrong(self, loaded):
        wrong = 0
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            expected, values = self.optimizer.state[parameter], loaded["optimizer"]["state"][index]
            is_right = float(values["step"]) == STEPS and torch.equal(loaded["model"][name], parameter.detach())
            is_right = is_right and all(torch.equal(values[m], expected[m]) for m in ("exp_avg", "exp_avg_sq"))
            wrong += not is_right
        return wrong


def sync(path, flags=os.O_RDONLY):
    file = os.open(path, flags)
    os.fsync(file)
    os.close(file)


def save(state, path):
    temporary = path + ".tmp"
    begin = time.perf_counter()
    torch.save(state.value(), temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    return {"seconds": time.perf_counter() - begin}


def load(state, path, check):
    options = {"weights_only": True} if IS_WEIGHTS_ONLY else {}
    begin = time.perf_counter()
    loaded = torch.load(path, **options)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "wrong": state.count_wrong(loaded) if check else 0}


def main(plan):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when stdin ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    answers = os.dup(1)
    os.dup2(2, 1)  # other output must not mix with the answers
    plan = json.loads(plan)
    torch.set_num_threads(plan["threads"])
    trim = ctypes.CDLL(None).malloc_trim
    state = State(plan["parameters"])
    os.write(answers, (json.dumps({"torch": torch.__version__}) + "\n").encode())
    for line in iter(sys.stdin.readline, ""):
        command, path = line.rstrip("\n").split(" ", 1)
        gc.collect()
        trim(0)  # as lockstep-bench does
        answer = save(state, path) if command == "save" else load(state, path, plan["check"])
        os.write(answers, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
