"""Compares the graphs in a file with the module in eager mode, on the values of the export.

Runs forward and backward as a program does that reads nothing but the file's description.
"""

import torch

from .errors import ExportError
from .modes import Mode

# For a tensor: the largest difference relative to its largest element. Elements of a tensor that is tiny beside the
# largest one of its kind are rounding errors, as the gradient of a bias before batch norm: they count relative to
# `floor` times the largest element of all.
TOLERANCES = {"float64": (1e-10, 1e-3), "float32": (1e-4, 1e-2), "high": (1e-2, 0.1), "autocast": (5e-2, 0.1)}


def tolerance_of(task, precision):
    if task.autocast is not None:
        return TOLERANCES["autocast"]
    dtypes = {value.dtype for value in task.parameters.values()} - {torch.float64, torch.complex128}
    if not dtypes:
        return TOLERANCES["float64"]
    if dtypes - {torch.float32, torch.complex64}:
        return TOLERANCES["autocast"]
    return TOLERANCES["high" if precision == "high" else "float32"]


class Package:
    """The graphs of a file, of which one at a time is loaded."""

    def __init__(self, path, device):
        self.path = path
        self.device_index = -1 if device.index is None else device.index

    def run(self, graph, inputs):
        loader = torch._C._aoti.AOTIModelPackageLoader(self.path, graph["name"], True, 1, self.device_index)
        with torch.no_grad():
            outputs = loader.boxed_run([tensor.detach() for tensor in inputs])
        for index, output in enumerate(outputs):
            if output is None:
                name = graph["name"]
                raise ExportError(f"output {index} of {name} is undefined: an operator of the module returns none")
        return outputs


def largest(tensor):
    return tensor.abs().max().item() if tensor.numel() else 0.0


class Comparison:
    def __init__(self, tolerance, floor):
        self.tolerance, self.floor = tolerance, floor
        self.worst = {}  # kind: the largest relative difference

    def compare(self, kind, pairs):
        """`pairs` are (name, compiled, eager) of one kind of tensor."""
        for name, compiled, eager in pairs:
            if compiled.shape != eager.shape or compiled.dtype != eager.dtype:
                raise ExportError(
                    f"the compiled {kind} {name} is {list(compiled.shape)} {compiled.dtype}, in eager mode "
                    f"{list(eager.shape)} {eager.dtype}"
                )
        floating = [pair for pair in pairs if pair[2].is_floating_point() or pair[2].is_complex()]
        least = self.floor * max((largest(torch.nan_to_num(wide(pair[2]), 0, 0, 0)) for pair in floating), default=0)
        for name, compiled, eager in pairs:
            difference = self.difference(compiled, eager, least)
            self.worst[kind] = max(self.worst.get(kind, 0.0), difference)
            if not difference <= self.tolerance:
                what = f"{kind} {name}".rstrip()
                raise ExportError(
                    f"the compiled {what} differs from eager mode by {difference:.1e} of its largest element, more "
                    f"than {self.tolerance:.0e}; does make() return realistic inputs? --no-check skips this comparison"
                )

    def difference(self, compiled, eager, least):
        if not (eager.is_floating_point() or eager.is_complex()):
            return 0.0 if torch.equal(compiled, eager) or self.tolerance > 1e-2 else 1.0
        compiled, eager = wide(compiled), wide(eager)
        same = (compiled == eager) | (compiled.isnan() & eager.isnan())
        if same.all():
            return 0.0
        scale = max(largest(torch.nan_to_num(eager, 0, 0, 0)), least)
        distance = (compiled - eager).abs()[~same].max().item()
        return distance / scale if scale > 0 else float("inf")


def wide(tensor):
    tensor = tensor.detach()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def tangents_for(outputs, shape):
    """Gradients of the outputs: 1 for a loss, otherwise random numbers."""
    generator = torch.Generator().manual_seed(0)
    tangents = []
    for tangent in shape["backward"]["tangents"]:
        output = outputs[tangent["output"]]
        if output.dim() == 0:
            tangents.append(torch.ones_like(output))
            continue
        value = torch.empty_strided(tangent["shape"], tangent["stride"], dtype=output.dtype, device=output.device)
        tangents.append(value.copy_(torch.randn(tangent["shape"], generator=generator, dtype=torch.float64)))
    return tangents


def eager_training(task, inputs):
    """The outputs with their graph, the buffers, the leaves in the order of the graphs' inputs, and their names."""
    parameters = {
        name: value.detach().requires_grad_(value.requires_grad) for name, value in task.parameters.items()
    }
    inputs = tuple(value.detach().requires_grad_(value.requires_grad) for value in inputs)
    with Mode(task, inputs, training=True) as mode:
        outputs, _, buffers = mode.run(parameters, task.buffers, inputs)
    return outputs, buffers, [*parameters.values(), *task.buffers.values(), *inputs], mode.names()


def check_training(task, inputs, shape, package, comparison):
    eager, eager_buffers, leaves, names = eager_training(task, inputs)
    forward, backward = shape["forward"], shape["backward"]
    tangents = tangents_for(eager, shape)
    torch.autograd.backward([eager[tangent["output"]] for tangent in backward["tangents"]], tangents)

    outputs = package.run(forward, leaves)
    kind = "loss" if task.loss is not None else "output"
    compare_outputs(task, forward, outputs, eager, eager_buffers, comparison, kind)
    kinds = {"input": leaves, "output": outputs}
    saved = [kinds[kind][index] for kind, index in backward["saved"]]
    gradients = package.run(backward, saved + tangents)

    for index, leaf in enumerate(leaves):
        if leaf.grad is not None and leaf.grad.any() and index not in backward["gradients"]:
            raise ExportError(f"the compiled backward gives no gradient for {names[index]}")
    pairs = []
    for index, gradient in zip(backward["gradients"], gradients):
        expected = leaves[index].grad
        pairs.append((names[index], gradient, torch.zeros_like(leaves[index]) if expected is None else expected))
    comparison.compare("gradient of", pairs)


def compare_outputs(task, graph, outputs, eager, eager_buffers, comparison, kind):
    count = graph["outputs"]
    shown = [str(index) for index in range(count)] if count > 1 else [""]
    comparison.compare(kind, list(zip(shown, outputs, eager)))
    names = list(task.buffers)
    written = [(names[index], value) for index, value in zip(graph["written_buffers"], outputs[count:])]
    comparison.compare("buffer", [(f"'{name}'", value, eager_buffers[name]) for name, value in written])


def check_evaluation(task, inputs, shape, package, comparison):
    with Mode(task, inputs, training=False) as mode:
        eager, _, buffers = mode.run(task.parameters, task.buffers, mode.inputs)
        arguments = mode.arguments()
    outputs = package.run(shape["evaluation"], arguments)
    compare_outputs(task, shape["evaluation"], outputs, eager, buffers, comparison, "evaluation output")


def check_file(path, task, shapes, random, precision):
    """Compares all graphs of a file. `random` tells per graph kind whether it uses random numbers, which differ between
    compiled and eager mode. Returns the largest difference per kind of tensor."""
    comparison = Comparison(*tolerance_of(task, precision))
    package = Package(path, task.device)
    for inputs, shape in zip(task.input_sets, shapes):
        if not random["training"]:
            check_training(task, inputs, shape, package, comparison)
        if not random["evaluation"]:
            check_evaluation(task, inputs, shape, package, comparison)
    return comparison
