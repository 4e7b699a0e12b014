"""Compiles graphs with AOTInductor, and writes the file.

The file is a zip archive that two readers understand: torch.load() finds a pickled dict with the description and the
state_dict, AOTIModelPackageLoader finds the compiled graphs in data/aotinductor/NAME/. PyTorch's writer puts both into
one archive, aligns all records to 64 bytes, and stores them uncompressed. AOTIModelPackageLoader extracts only files
whose names begin with data/aotinductor/NAME or data/constants, so the state_dict is not extracted.
"""

import os
import pickle
import platform

import torch
from torch._inductor import aot_compile, config
from torch.nn.modules.batchnorm import _BatchNorm

FORMAT, FORMAT_VERSION = "lockstep compiled model", 1

# Prefixes of the CPU flags in /proc/cpuinfo that stand for instructions a compiler may use with -march=native.
INSTRUCTION_SETS = (
    *("sse", "pni", "ssse3", "avx", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt", "movbe", "adx", "cx16"),
    *("amx", "sha_ni", "vaes", "gfni"),
    *("asimd", "sve", "bf16", "i8mm", "fphp", "fcma", "jscvt", "atomics", "lrcpc", "ilrcpc"),
)


def instruction_sets(path="/proc/cpuinfo"):
    """The instruction-set extensions of this CPU, by the names of Linux; [] where /proc/cpuinfo does not list them."""
    try:
        with open(path) as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return sorted(flag for flag in set(value.split()) if flag.startswith(INSTRUCTION_SETS))
    except OSError:
        pass
    return []


def select_compiler():
    """The setting for a g++ that links as lockstep needs it; cxx/g++ describes how. Nothing for another compiler."""
    chosen = os.environ.get("CXX", "g++")
    if "g++" not in os.path.basename(chosen) or "clang" in chosen:
        return {}
    return {"cpp.cxx": (None, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cxx", "g++"))}


def compile_graph(graph, folder, max_autotune):
    """The files of AOTInductor for a graph, in a new folder below `folder`."""
    options = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": os.path.join(folder, graph.name),
        "max_autotune": max_autotune,
        "cpp.dynamic_threads": True,  # otherwise the number of threads of this process is compiled into the kernels
    }
    if hasattr(config.aot_inductor, "enable_line_tables"):
        options["aot_inductor.enable_line_tables"] = False  # they triple the size of the libraries
    with torch.no_grad(), config.patch(select_compiler()):
        return aot_compile(graph.module, graph.examples(), options=options)


def describe(task, shapes, precision):
    """The dict in the file: only what torch.load(weights_only=True) reads."""
    device = task.device.type
    with_gradient = set(shapes[0]["backward"]["gradients"])
    capability = ".".join(map(str, torch.cuda.get_device_capability(task.device))) if device == "cuda" else None
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "torch": torch.__version__.partition("+")[0],
        "device": device,
        "architecture": platform.machine(),
        "compute_capability": capability,
        "instruction_set": instruction_sets(),
        "model": type(task.module).__name__,
        "has_loss": task.loss is not None,
        "has_batch_norm": any(isinstance(layer, _BatchNorm) for layer in task.module.modules()),
        "autocast": task.autocast,
        "float32_matmul_precision": precision,
        "state_dict": task.state_dict,
        "constants": task.constants,
        "parameters": list(task.parameters),
        "requires_grad": [parameter.requires_grad for parameter in task.parameters.values()],
        "has_gradient": [index in with_gradient for index in range(len(task.parameters))],
        "buffers": list(task.buffers),
        "aliases": task.aliases,
        "shapes": shapes,
    }


def write_package(path, description, files):
    """Writes the file: `files` are AOTInductor's, by the names of the graphs."""
    with open(path, "wb") as stream:  # of a stream, the archive's folder is called "archive"
        writer = torch._C.PyTorchFileWriter(stream)
        torch.serialization._save(description, writer, pickle, 2, False)
        for name, paths in files.items():
            for file in paths:
                if not isinstance(file, str):
                    raise RuntimeError(f"{name} has constants outside of its library")
                if file == "":
                    continue
                with open(file, "rb") as source:
                    content = source.read()
                writer.write_record(f"data/aotinductor/{name}/{os.path.basename(file)}", content, len(content))
        for record, text in (("archive_format", b"pt2"), ("archive_version", b"0")):
            writer.write_record(record, text, len(text))
        writer.write_end_of_file()
