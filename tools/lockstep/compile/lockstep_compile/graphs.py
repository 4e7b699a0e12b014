"""The graphs that are compiled: forward and backward for training, and evaluation.

A traced graph is simplified, and its inputs and outputs are described as in the file:

* an unchanged buffer is no output;
* a parameter, a buffer or an input that backward needs, or a view of one, is no output of forward: backward receives
  the input itself;
* a value that is both an output and needed by backward is one output;
* a missing gradient is no output of backward; the others have their own memory.
"""

from dataclasses import dataclass

import torch

from .errors import ExportError
from .model import describe_shape
from .modes import placeholders


@dataclass
class Graph:
    name: str  # in the package: "forward_0"
    module: torch.fx.GraphModule
    description: dict  # as in the file

    def examples(self):
        """Fake tensors that stand for the inputs."""
        fakes = [node.meta["val"] for node in self.module.graph.find_nodes(op="placeholder")]
        with fakes[0].fake_mode:
            return tuple(fake.detach() for fake in fakes)


def output_node(graph):
    return next(iter(graph.graph.find_nodes(op="output")))


def set_outputs(graph, outputs):
    """Replaces a graph's outputs, and removes nodes that are not used any more; placeholders stay."""
    node = output_node(graph)
    node.args = (tuple(outputs),)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def value_of(node):
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"backward needs a symbolic number ({node.name}); all shapes must be static")
    return value


def same_layout(first, second):
    return first.shape == second.shape and first.dtype == second.dtype and first.stride() == second.stride()


def storage_of(node):
    return node.meta["val"].untyped_storage()._cdata


def own_memory(graph, nodes):
    """The nodes, or contiguous copies of those that share memory with an input or with an earlier node: gradients are
    reduced and scaled in place."""
    seen = {storage_of(node) for node in placeholders(graph)}
    result = []
    for node in nodes:
        value = node.meta["val"]
        if storage_of(node) in seen or not value.is_contiguous():
            with graph.graph.inserting_before(output_node(graph)):
                copy = graph.graph.call_function(
                    torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            with value.fake_mode:
                copy.meta["val"] = value.clone(memory_format=torch.contiguous_format)
            node = copy
        seen.add(storage_of(node))
        result.append(node)
    return result


COPIES = (torch.ops.aten.clone.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def unchanged(node, placeholder):
    """Whether a node is this placeholder or a copy of it."""
    while node is not placeholder and node.op == "call_function" and node.target in COPIES:
        node = node.args[0]
    return node is placeholder


def view_of_input(node):
    """The views that lead from a placeholder to this node, [placeholder, view, ..., node]; None if there are none."""
    chain = [node]
    while chain[0].op == "call_function":
        first = chain[0]
        schema = getattr(first.target, "_schema", None)
        is_view = schema is not None and any(
            argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments
        )
        if not is_view or len(first.all_input_nodes) != 1:
            return None
        chain.insert(0, first.all_input_nodes[0])
    return chain if chain[0].op == "placeholder" else None


def receive_inputs(saved, backward):
    """Lets the backward graph compute the saved values that are views of the forward graph's inputs. `saved` are pairs
    (node of forward, placeholder of backward). Returns them with the placeholders of the inputs instead."""
    received = {node.name: (node, placeholder) for node, placeholder in saved}
    result = []
    for node, placeholder in saved:
        chain = view_of_input(node)
        if chain is None or len(chain) == 1:
            result.append((node, placeholder))
            continue
        base = chain[0]
        if base.name not in received:
            with backward.graph.inserting_before(placeholder):
                new = backward.graph.placeholder(base.name)
            new.meta = dict(base.meta)
            received[base.name] = (base, new)
            result.append(received[base.name])
        values = {base: received[base.name][1]}
        with backward.graph.inserting_before(next(node for node in backward.graph.nodes if node.op != "placeholder")):
            for view in chain[1:]:
                values[view] = backward.graph.node_copy(view, values.__getitem__)
        placeholder.replace_all_uses_with(values[node])
        backward.graph.erase_node(placeholder)
    return result


class Writer:
    """Chooses the outputs of a graph that computes a mode."""

    def __init__(self, mode, probe, graph, number):
        self.mode, self.probe, self.graph, self.number = mode, probe, graph, number
        self.inputs = placeholders(graph)
        if len(self.inputs) != len(mode.arguments()):
            raise ExportError(f"internal error: the graph has {len(self.inputs)} inputs, not {len(mode.arguments())}")
        task = mode.task
        count = len(probe.outputs)
        outputs = list(output_node(graph).args[0])
        first_buffer = len(task.parameters)
        self.written = [
            index
            for index in range(len(task.buffers))
            if not unchanged(outputs[count + index], self.inputs[first_buffer + index])
        ]
        for index in self.written:
            self.check_written(list(task.buffers)[index])
        self.saved = outputs[count + len(task.buffers) :]
        self.outputs = outputs[:count] + [outputs[count + index] for index in self.written]

    def check_written(self, name):
        task = self.mode.task
        if name in task.constants:
            raise ExportError(
                f"forward changes the buffer '{name}', which is not persistent; register it with persistent=True"
                + (" in the module, not in the loss" if name in task.loss_buffers else "")
            )
        storage = task.buffers[name].untyped_storage().data_ptr()
        for other, value in task.buffers.items():
            if other != name and value.numel() > 0 and value.untyped_storage().data_ptr() == storage:
                raise ExportError(f"forward changes the buffer '{name}', which shares memory with '{other}'; clone one")

    def description(self, kind):
        return {
            "name": f"{kind}_{self.number}",
            "outputs": len(self.probe.outputs),
            "structure": self.probe.structure,
            "written_buffers": self.written,
        }

    def finish(self, kind, extra):
        set_outputs(self.graph, self.outputs)
        description = self.description(kind) | extra
        return Graph(description["name"], self.graph, description)


def make_training(mode, probe, number):
    """The forward and the backward graph."""
    forward, backward = mode.trace(probe)
    writer = Writer(mode, probe, forward, number)
    received = placeholders(backward)
    pairs, tangent_nodes = list(zip(writer.saved, received)), received[len(writer.saved) :]
    differentiable = [index for index, output in enumerate(probe.outputs) if output.requires_grad]
    if len(tangent_nodes) != len(differentiable):
        raise ExportError(f"internal error: {len(tangent_nodes)} tangents for {len(differentiable)} outputs")

    for node, placeholder in pairs:
        if node.name != placeholder.name or not same_layout(value_of(node), value_of(placeholder)):
            raise ExportError(f"internal error: forward saves {node.name}, backward expects {placeholder.name}")
    saved, inputs = [], {node: index for index, node in enumerate(writer.inputs)}
    for node, _ in receive_inputs(pairs, backward):
        if node in inputs:
            saved.append(["input", inputs[node]])
            continue
        if node not in writer.outputs:
            writer.outputs.append(node)
        saved.append(["output", writer.outputs.index(node)])

    tangents = []
    for index, node in zip(differentiable, tangent_nodes):
        value = value_of(node)
        if value.shape != probe.outputs[index].shape or value.dtype != probe.outputs[index].dtype:
            raise ExportError(
                f"output {index} is {describe_shape(probe.outputs[index])} in eager mode, but {describe_shape(value)} "
                "in the traced graph; this PyTorch cannot trace an operator of the module"
            )
        tangents.append(
            {
                "output": index,
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
        )

    gradients = list(output_node(backward).args[0])
    if len(gradients) != len(writer.inputs):
        raise ExportError(f"internal error: backward has {len(gradients)} gradients for {len(writer.inputs)} inputs")
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    for index in indices:
        if value_of(gradients[index]).layout != torch.strided:
            raise ExportError(f"the gradient of {mode.names()[index]} is sparse; use a layer with a dense gradient")
    set_outputs(backward, own_memory(backward, [gradients[index] for index in indices]))
    name = f"backward_{number}"
    description = {"name": name, "saved": saved, "tangents": tangents, "gradients": indices}
    extra = {"output_requires_grad": [output.requires_grad for output in probe.outputs]}
    return writer.finish("forward", extra), Graph(name, backward, description)


def make_evaluation(mode, probe, number):
    (graph,) = mode.trace(probe)
    return Writer(mode, probe, graph, number).finish("evaluation", {"inputs": len(mode.inputs)})
