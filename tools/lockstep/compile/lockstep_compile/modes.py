"""Runs a task in training or in evaluation, in eager mode, and traces it.

Each mode of a module becomes one pure function of (parameters, buffers, inputs), which are the inputs of its graphs in
this order. The function returns the tensors of the module's output, then the new value of each buffer. AOTAutograd
traces the function; Inductor's partitioner divides the joint graph into forward and backward.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch._functorch.aot_autograd import aot_function
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

from .errors import ExportError, first_line, user_line, user_trace
from .model import describe_shape

CONSTANT_BYTES = 4096  # a larger tensor outside of parameters and buffers is refused


@dataclass
class Probe:
    """What one run in eager mode tells about a mode of a module."""

    structure: object  # of the output, as in the file
    outputs: list
    is_alias: list  # per output: shares memory with an input or with an earlier output
    is_random: bool


def placeholders(graph):
    return list(graph.graph.find_nodes(op="placeholder"))


def kind_of(tensor):
    return tensor.shape, tensor.dtype, tensor.device


def flatten(value, leaves, path="output"):
    """Appends the tensors of a value to `leaves`, and returns its structure."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return len(leaves) - 1
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(flatten(item, leaves, f"{path}[{index}]") for index, item in enumerate(value))]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ExportError(f"{path} is a dict with the key {key!r}; use strings as keys")
        return ["dict", *([key, flatten(item, leaves, f"{path}['{key}']")] for key, item in value.items())]
    raise ExportError(f"{path} is {type(value).__name__}; return tensors, or tuples, lists and dicts of tensors")


class Mode:
    """Training or evaluation of a task, for one set of inputs."""

    def __init__(self, task, inputs, training):
        self.task = task
        self.training = training
        self.inputs = inputs if training or task.loss is None else inputs[:-1]

    def __enter__(self):
        self.modes = {module: module.training for module in self.task.module.modules()}
        if not self.training:
            self.task.module.eval()
        self.grad_mode = torch.set_grad_enabled(self.training)
        self.grad_mode.__enter__()
        return self

    def __exit__(self, *error):
        self.grad_mode.__exit__(*error)
        for module, training in self.modes.items():
            module.training = training

    def run(self, parameters, buffers, inputs):
        """The output's tensors, its structure, and the buffers after the call."""
        output, buffers = self.task.call(parameters, buffers, inputs, self.training)
        leaves = []
        structure = flatten(output, leaves)
        return leaves, structure, buffers

    def generator_state(self):
        return torch.cuda.get_rng_state(self.task.device) if self.task.device.type == "cuda" else torch.get_rng_state()

    def probe(self):
        """Runs the module once in eager mode, where errors have a readable traceback."""
        generator = self.generator_state()
        versions = [tensor._version for tensor in self.arguments()]
        try:
            outputs, structure, buffers = self.run(self.task.parameters, self.task.buffers, self.inputs)
        except ExportError:
            raise
        except Exception as error:
            what = "forward" if self.task.loss is None or not self.training else "forward or the loss"
            message = f"{what} failed: {type(error).__name__}: {first_line(error)}"
            raise ExportError(message, user_trace(error)) from error
        for name, tensor, version in zip(self.names(), self.arguments(), versions):
            if tensor._version != version:
                raise ExportError(f"forward changes {name} in place; change a clone, or make it a buffer")
        self.check(outputs, structure, buffers)
        seen = {tensor.untyped_storage().data_ptr() for tensor in self.arguments()}
        is_alias = []
        for output in outputs:
            storage = output.untyped_storage().data_ptr()
            is_alias.append(storage in seen)
            seen.add(storage)
        return Probe(structure, outputs, is_alias, not torch.equal(generator, self.generator_state()))

    def check(self, outputs, structure, buffers):
        if not outputs:
            raise ExportError("forward returns no tensor")
        for output in outputs:
            if output.layout != torch.strided:
                raise ExportError(f"an output has the layout {output.layout}; return dense tensors")
            if output.device != self.task.device:
                raise ExportError(f"an output is on {output.device}, the module on {self.task.device}")
        for name, value in buffers.items():
            before = self.task.buffers[name]
            if value is None or kind_of(value) != kind_of(before):
                now = "None" if value is None else f"{describe_shape(value)} on {value.device}"
                raise ExportError(
                    f"forward replaces the buffer '{name}', {describe_shape(before)} on {before.device}, by {now}; "
                    "a buffer must keep its shape, dtype and device"
                )
        if not self.training:
            return
        if self.task.loss is not None:
            if structure != 0 or outputs[0].dim() != 0 or not outputs[0].is_floating_point():
                got = describe_shape(outputs[0]) if structure == 0 else type(structure).__name__ + " of tensors"
                raise ExportError(f"the loss is {got}; it must be one floating point tensor of shape []")
        if not any(output.requires_grad for output in outputs):
            raise ExportError("no output requires a gradient; does forward use detach() or torch.no_grad()?")

    def arguments(self):
        return [*self.task.parameters.values(), *self.task.buffers.values(), *self.inputs]

    def names(self):
        """The arguments' names for messages."""
        named = [f"'{name}'" for name in (*self.task.parameters, *self.task.buffers)]
        return named + [f"input {index}" for index in range(len(self.inputs))]

    def function(self, probe):
        """The pure function to be traced."""

        def run(*arguments):
            arguments = list(arguments)
            parameters = {name: arguments.pop(0) for name in self.task.parameters}
            buffers = {name: arguments.pop(0) for name in self.task.buffers}
            outputs, _, buffers = self.run(parameters, buffers, tuple(arguments))
            outputs = [output.clone() if alias else output for output, alias in zip(outputs, probe.is_alias)]
            return outputs + [
                value.detach().clone(memory_format=torch.contiguous_format) for value in buffers.values()
            ]

        return run

    def trace(self, probe):
        """The graphs that AOTAutograd makes of the function: [forward, backward], or [evaluation]."""
        graphs = []

        class Traced(BaseException):
            """Ends aot_function as soon as it has the graphs."""

        def keep(graph, _):
            graphs.append(graph)
            raise Traced

        def partition(joint, inputs, **options):
            with V.set_fake_mode(placeholders(joint)[0].meta["val"].fake_mode):  # for the random numbers
                graphs.extend(partition_fn(joint, inputs, **options))
            raise Traced

        traced = aot_function(
            self.function(probe),
            fw_compiler=keep,
            inference_compiler=keep,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        try:
            with self.recurrent_layers():
                traced(*self.arguments())
        except Traced:
            pass
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(explain(error, self.task.module)) from error
        for graph in graphs:
            self.refuse_constants(graph)
        return graphs

    def recurrent_layers(self):
        """oneDNN's LSTM saves nothing for backward when a graph runs it: recurrent layers are traced without oneDNN."""
        if any(isinstance(part, torch.nn.RNNBase) for part in self.task.module.modules()):
            return torch.backends.mkldnn.flags(enabled=False)
        return nullcontext()

    def refuse_constants(self, graph):
        for node in graph.graph.find_nodes(op="get_attr"):
            value = getattr(graph, node.target, None)
            if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > CONSTANT_BYTES:
                raise ExportError(describe_constant(self.task.module, value))


def held_tensors(module):
    """(name, tensor) of the tensors that a module holds outside of parameters and buffers."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            values = [value]
            if isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
                values = value.values() if isinstance(value, dict) else value
            for item in values:
                if isinstance(item, torch.Tensor):
                    yield f"{prefix}.{name}".lstrip("."), item


def describe_constant(module, value):
    for name, tensor in held_tensors(module):
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            return (
                f"the module holds the tensor '{name}', {describe_shape(tensor)}, outside of its parameters and "
                f"buffers; use register_buffer('{name.rpartition('.')[2]}', ..., persistent=False)"
            )
    return f"forward uses a constant tensor, {describe_shape(value)}; register it as a buffer of the module"


def explain(error, module):
    """Why tracing failed, in one line with the place in the user's code."""
    kind, text = type(error).__name__, first_line(error)
    if kind in ("DataDependentOutputException", "GuardOnDataDependentSymNode"):
        reason = "forward needs the value of a tensor (.item(), if, bool(), int()); compute with tensors instead"
    elif kind == "DynamicOutputShapeException":
        reason = f"the shape of a result depends on values ({text}); all shapes must be static"
    elif "allow_non_fake_inputs" in text:
        held = ", ".join(f"'{name}'" for name, _ in held_tensors(module))
        reason = (
            "forward uses a tensor that is neither a parameter, a buffer nor an input"
            + (f" (the module holds {held})" if held else "")
            + "; use register_buffer(name, tensor, persistent=False)"
        )
    else:
        reason = f"{kind}: {text}"
    return user_line(error) + reason
