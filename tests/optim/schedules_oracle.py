"""The learning rates of PyTorch's own schedulers.

Usage: schedules_oracle.py CASES RESULTS FOLDER

CASES is a JSON list. A case is a scheduler of an optimizer `o`, as a Python expression, and a number of steps, or a list
of metrics for ReduceLROnPlateau (null is NaN). RESULTS becomes a list with the rates and the momenta of both parameter
groups before the first step and after each one. Of a case with `save_after`, FOLDER gets the states of scheduler and
optimizer after that many steps, as NAME.pt.
"""
import json
import math
import os
import sys
import warnings

import torch
from torch.optim.lr_scheduler import *
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

warnings.simplefilter("ignore")  # no optimizer steps here


class HandOver:
    """What SequentialLR should do, where it cannot: at a step, `then` begins with the rate that `first` left."""

    def __init__(self, first, at, then):
        self.active, self.at, self.then, self.t = first, at, then, 0

    def step(self):
        self.t += 1
        if self.t == self.at:
            self.active = self.then()
        else:
            self.active.step()


def at_initial_lr(o):
    """Resets the rates, as SequentialLR does, and returns the optimizer."""
    for group in o.param_groups:
        group["lr"] = group["initial_lr"]
    return o


def make_optimizer(kind):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))], "lr": lr} for lr in (0.1, 0.03)]
    if kind == "adam":
        return torch.optim.Adam(groups, betas=(0.5, 0.9))
    return torch.optim.SGD(groups, lr=1.0, momentum=0.5)


def momentum_of(group):
    return group["betas"][0] if "betas" in group else group["momentum"]


def run(case, folder):
    o = make_optimizer(case["optimizer"])
    scheduler = eval(case["python"], {**globals(), "o": o})
    result = {"lrs": [], "momenta": []}

    def note():
        result["lrs"].append([group["lr"] for group in o.param_groups])
        result["momenta"].append([momentum_of(group) for group in o.param_groups])

    note()
    metrics = case.get("metrics")
    for t in range(1, (len(metrics) if metrics else case["steps"]) + 1):
        if t == case.get("halve_at"):
            for group in o.param_groups:
                group["lr"] *= 0.5
        if metrics:
            metric = metrics[t - 1]
            scheduler.step(math.nan if metric is None else metric)
        else:
            scheduler.step()
        note()
        if t == case.get("save_after"):
            torch.save({"scheduler": scheduler.state_dict(), "optimizer": o.state_dict()},
                       os.path.join(folder, case["name"] + ".pt"))
    if metrics:
        state = scheduler.state_dict()
        result["state"] = {key: state[key] for key in ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")}
    return result


cases_file, results_file, folder = sys.argv[1:]
with open(cases_file) as file:
    cases = json.load(file)
with open(results_file, "w") as file:
    json.dump([run(case, folder) for case in cases], file, allow_nan=False)
