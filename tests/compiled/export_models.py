"""Compiles the models of models.py, and that of the example, for the tests of CompiledModule. Writes what they compute in
eager mode.

    export_models.py FOLDER cpu|cuda [NAMES...]

Writes NAME.pt2 and NAME.reference.pt into the folder. A file that is newer than this script, models.py and the exporter is
kept, if the same PyTorch wrote it.
"""

import copy
import os
import runpy
import sys

import torch

TESTS = os.path.dirname(os.path.abspath(__file__))
EXPORTER = os.path.join(TESTS, "..", "..", "tools", "lockstep", "compile")
sys.path[:0] = [TESTS, EXPORTER]

import models
from lockstep_compile.exporter import Options, export

EXAMPLE = os.path.join(TESTS, "..", "..", "examples", "12_compiled", "model.py")
NAMES = [name.removeprefix("make_") for name in vars(models) if name.startswith("make_")] + ["example"]


def function_of(name):
    """The function that makes the model: of models.py, or of the example."""
    return runpy.run_path(EXAMPLE)["make"] if name == "example" else getattr(models, "make_" + name)


def gradients_of(module):
    return {name: value.grad for name, value in module.named_parameters(remove_duplicate=False)}


def reference(make):
    """What the model computes in one step in training mode, and then in evaluation mode."""
    module, sets, *loss = make()
    inputs = sets if isinstance(sets, tuple) else sets[0]
    written = {"inputs": list(inputs), "state_dict": copy.deepcopy(module.state_dict())}
    if loss:
        value = loss[0](module(*inputs[:-1]), inputs[-1])
        value.backward()
        written["loss"] = value.detach()
        written["buffers"] = {name: value for name, value in module.named_buffers() if name in written["state_dict"]}
        written["evaluation"] = module.eval()(*inputs[:-1]).detach()
    else:
        output = module(*inputs)
        if isinstance(output, dict):
            (output["sum"].pow(2).sum() + output["hidden"][0].t().sin().sum()).backward()
            written["outputs"] = {"sum": output["sum"].detach(), "hidden": [output["hidden"][0].detach()]}
            written["input_gradient"] = inputs[0].grad
    written["gradients"] = gradients_of(module)
    written["inputs"] = [value.detach() for value in inputs]
    return written


def is_current(path):
    sources = [__file__, models.__file__, EXAMPLE]
    for folder, _, names in os.walk(os.path.join(EXPORTER, "lockstep_compile")):
        sources += [os.path.join(folder, name) for name in names if not name.endswith(".pyc")]
    if not os.path.exists(path) or os.path.getmtime(path) < max(map(os.path.getmtime, sources)):
        return False
    return torch.load(path, weights_only=True)["torch"] == torch.__version__.partition("+")[0]


def main(folder, device, *names):
    os.makedirs(folder, exist_ok=True)
    if device == "cuda" and not torch.cuda.is_available():
        print("could not run: models for a GPU: this machine has none")
        return
    for name in names or NAMES:
        make = function_of(name)
        path = os.path.join(folder, name + ".pt2")
        if is_current(path):
            continue
        if name != "example":
            torch.save(reference(make), os.path.join(folder, name + ".reference.pt"))
        export(make, path, Options(device=device), lambda line: print(f"{name}: {line}", flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
