"""Python's side of the tests of weight averages: torch.optim.swa_utils.

  toolbox_oracle.py make FOLDER                        averages of every kind, and update_bn
  toolbox_oracle.py continue KIND USE_BUFFERS IN OUT   loads an average that lockstep has saved, and updates it further

The model and its weights at each step are the same in weight_average_test.cpp.
"""
import os
import sys

import torch
from torch import nn
from torch.optim import swa_utils

IS_2X = int(torch.__version__.split(".")[0]) >= 2
DECAY = 0.9
STEPS = 6  # that "make" does, and after which the other side continues
MORE_STEPS = 4


class Net(nn.Module):
    """With a module that has two names, and statistics."""
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4)
        self.again = self.tied
        self.double()

    def forward(self, x):
        return self.again(torch.tanh(self.tied(self.norm(self.first(x)))))


class Wrapper(nn.Module):
    """With the names of DistributedDataParallel, which needs a process group."""
    def __init__(self, module):
        super().__init__()
        self.module = module


def set_weights(model, step):
    """Of each tensor of the state, by its place there."""
    with torch.no_grad():
        for place, tensor in enumerate(model.state_dict().values()):
            if tensor.is_floating_point():
                values = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) * (place + 1) + step)
                tensor.copy_(values.view(tensor.shape) + 1.5)
            else:
                tensor.fill_(step + 1)


def averaged(model, kind, use_buffers):
    if kind == "swa":
        return swa_utils.AveragedModel(model, use_buffers=use_buffers)
    if IS_2X:
        return swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers)
    # 1.13 has no function for it.
    return swa_utils.AveragedModel(
        model, avg_fn=lambda average, weight, _: DECAY * average + (1 - DECAY) * weight, use_buffers=use_buffers)


def update(average, model, use_buffers, steps):
    for step in steps:
        set_weights(model, step)
        average.update_parameters(model)
        if not IS_2X and not use_buffers:  # as 2.x does
            with torch.no_grad():
                for own, buffer in zip(average.module.buffers(), model.buffers()):
                    own.copy_(buffer)


def batches():
    return [torch.sin(torch.arange(3 * size, dtype=torch.float64) * (number + 1)).view(size, 3)
            for number, size in enumerate([6, 4, 8, 5, 7])]


def make(folder):
    def at(name):
        return os.path.join(folder, name)
    for kind in ("ema", "swa"):
        for use_buffers in (False, True):
            model = Net()
            average = averaged(model, kind, use_buffers)
            update(average, model, use_buffers, range(STEPS))
            torch.save(average.state_dict(), at(f"{kind}_{int(use_buffers)}.pt"))
            update(average, model, use_buffers, range(STEPS, STEPS + MORE_STEPS))
            torch.save(average.state_dict(), at(f"{kind}_{int(use_buffers)}.more.pt"))

    model = Net()
    wrapper = Wrapper(model)
    wrapped = swa_utils.AveragedModel(wrapper)
    update(wrapped, wrapper, False, range(STEPS))
    torch.save(wrapped.state_dict(), at("wrapped.pt"))

    model = Net()
    set_weights(model, 0)
    model.eval()
    swa_utils.update_bn(batches(), model)
    assert not model.training and model.norm.momentum == 0.1
    torch.save(model.state_dict(), at("update_bn.pt"))


def continue_(kind, use_buffers, source, target):
    use_buffers = use_buffers == "1"
    model = Net()
    average = averaged(model, kind, use_buffers)
    average.load_state_dict(torch.load(source))
    assert average.n_averaged == STEPS
    update(average, model, use_buffers, range(STEPS, STEPS + MORE_STEPS))
    torch.save(average.state_dict(), target)


if __name__ == "__main__":
    command, arguments = sys.argv[1], sys.argv[2:]
    {"make": make, "continue": continue_}[command](*arguments)
