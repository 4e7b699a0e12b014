"""Exports a PyTorch module with its training graphs into one file, for lockstep::CompiledModule."""

import logging
import os
import shutil
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch._inductor import select_algorithm

from .check import check_file
from .errors import ExportError, UsageError, first_line, user_line
from .graphs import make_evaluation, make_training
from .model import describe_shapes, make_task
from .modes import Mode
from .package import compile_graph, describe, write_package


@dataclass
class Options:
    autocast: str | None = None  # bfloat16, float16
    device: str | None = None  # cpu, cuda; None: that of the module
    max_autotune: bool = False
    precision: str = "highest"  # of float32 matrix multiplications
    check: bool = True


def silence_torch():
    """Hides warnings and logs that are meant for developers of PyTorch. Errors are raised nevertheless."""
    warnings.filterwarnings("ignore", module=r"torch(\.|$)")
    warnings.filterwarnings("ignore", message=r".*treespec.*", category=FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)
    select_algorithm.PRINT_AUTOTUNE = False


def describe_dtypes(task):
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in task.parameters.values()})
    return " and ".join(dtypes) + (f", autocast to {task.autocast}" if task.autocast else "")


def describe_model(task):
    count = sum(value.numel() for value in task.parameters.values())
    device = f"{task.device.type} ({torch.cuda.get_device_name(task.device)})" if task.device.type == "cuda" else "cpu"
    loss = "with loss" if task.loss is not None else "without loss"
    return f"{type(task.module).__name__}: {count:,} parameters, {describe_dtypes(task)}, on {device}, {loss}"


def trace(task):
    """The graphs of each set of inputs, and which modes use random numbers."""
    sets, random = [], {"training": False, "evaluation": False}
    width = len(str(len(task.input_sets) - 1))  # AOTIModelPackageLoader takes forward_1 for a prefix of forward_10
    for number, inputs in enumerate(task.input_sets):
        graphs = []
        for training, make in ((True, make_training), (False, make_evaluation)):
            with Mode(task, inputs, training) as mode:
                probe = mode.probe()
                made = make(mode, probe, f"{number:0{width}}")
            graphs.extend(made if training else [made])
            random["training" if training else "evaluation"] |= probe.is_random
        sets.append(graphs)
    names = list(task.parameters)
    for graphs in sets[1:]:
        for index in set(sets[0][1].description["gradients"]) ^ set(graphs[1].description["gradients"]):
            if index < len(names):
                raise ExportError(f"the parameter '{names[index]}' gets a gradient with some of the shapes only")
    return sets, random


def describe_sets(task, sets):
    """The entry "shapes" of the file's description."""
    return [
        {
            "inputs": [
                {
                    "shape": list(value.shape),
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "requires_grad": value.requires_grad,
                }
                for value in inputs
            ],
            **{kind: graph.description for kind, graph in zip(("forward", "backward", "evaluation"), graphs)},
        }
        for inputs, graphs in zip(task.input_sets, sets)
    ]


def compile_all(task, sets, options, folder, say):
    """AOTInductor's files by the names of the graphs."""
    files = {}
    for inputs, graphs in zip(task.input_sets, sets):
        for graph in graphs:
            begin = time.monotonic()
            kind = graph.name.rpartition("_")[0]
            shown = inputs[:-1] if kind == "evaluation" and task.loss is not None else inputs
            try:
                files[graph.name] = compile_graph(graph, folder, options.max_autotune)
            except Exception as error:
                raise ExportError(f"Inductor cannot compile {kind}: {user_line(error)}{first_line(error)}") from error
            say(f"compiled {kind} for {describe_shapes(shown) or 'no input'} in {time.monotonic() - begin:.1f} s")
    return files


def report_check(comparison, random):
    worst = ", ".join(f"{kind.removesuffix(' of')} {value:.0e}" for kind, value in comparison.worst.items())
    skipped = [mode for mode in ("training", "evaluation") if random[mode]]
    line = f"checked against eager mode: largest relative differences: {worst} (allowed: {comparison.tolerance:.0e})"
    if not worst:
        return "not checked against eager mode, because of random numbers"
    return line + (f"; {' and '.join(skipped)} not compared, because of random numbers" if skipped else "")


def format_size(size):
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def export(make, path, options=Options(), say=lambda line: None):
    """Writes the file `path` with what make() returns. Calls `say` with lines about the progress.
    Raises UsageError and ExportError; then no file is written."""
    begin = time.monotonic()
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: the folder {folder} does not exist")
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"{path}: cannot write a file there")
    silence_torch()
    torch.set_float32_matmul_precision(options.precision)
    task = make_task(make, options.device, options.autocast)
    say(describe_model(task))
    with torch.cuda.device(task.device) if task.device.type == "cuda" else nullcontext():
        write(task, path, options, say)
    say(f"{path}: {format_size(os.path.getsize(path))}, in {time.monotonic() - begin:.0f} s")


def write(task, path, options, say):
    """Traces, compiles, writes and checks. The file gets its name when it is complete."""
    sets, random = trace(task)
    shapes = describe_sets(task, sets)
    work = tempfile.mkdtemp(prefix="lockstep-compile-")
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.pt2")
    try:
        files = compile_all(task, sets, options, work, say)
        write_package(temporary, describe(task, shapes, options.precision), files)
        if options.check:
            say(report_check(check_file(temporary, task, shapes, random, options.precision), random))
        os.replace(temporary, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if os.path.exists(temporary):
            os.remove(temporary)
