"""What make() returns, checked: the module, its loss, its example inputs, and the order of its tensors."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from .errors import ExportError, UsageError, user_trace

EXPECTED = "return (module, inputs) or (module, inputs, loss), inputs being a tuple of tensors or a list of such tuples"
LOSS = "loss."  # prefix of the buffers of a loss that is a module


def describe_shape(tensor):
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def describe_shapes(tensors):
    return ", ".join(map(describe_shape, tensors))


@dataclass
class Task:
    """A module with everything that its graphs depend on. Values are contiguous and on one device."""

    module: nn.Module
    loss: object  # a function of (output, target), or None
    input_sets: list  # tuples of tensors; with a loss, the last tensor is the target
    device: torch.device
    autocast: str | None  # the name of a dtype
    parameters: dict = field(default_factory=dict)  # unique, under their first names, in the order of the graphs
    buffers: dict = field(default_factory=dict)  # likewise, then those of the loss
    loss_buffers: list = field(default_factory=list)  # names in `buffers`
    aliases: dict = field(default_factory=dict)  # another name of a tied parameter or buffer: its first name
    state_dict: dict = field(default_factory=dict)  # on the CPU
    constants: dict = field(default_factory=dict)  # non-persistent buffers, on the CPU

    def autocasting(self):
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.autocast))

    def call(self, parameters, buffers, inputs, training):
        """Runs the module, in training with the loss, on these values (dicts by name). Buffers change in a copy.
        Returns the output and the buffers after the call."""
        state = parameters | {name: value.clone() for name, value in buffers.items()}
        of_loss = {name.removeprefix(LOSS): state.pop(name) for name in self.loss_buffers}
        state |= {name: state[first] for name, first in self.aliases.items()}
        with self.autocasting():
            if training and self.loss is not None:
                output = torch.func.functional_call(self.module, state, inputs[:-1])
                if isinstance(self.loss, nn.Module):
                    output = torch.func.functional_call(self.loss, of_loss, (output, inputs[-1]))
                else:
                    output = self.loss(output, inputs[-1])
            else:
                output = torch.func.functional_call(self.module, state, inputs)
        for name, first in self.aliases.items():
            if state[name] is not state[first]:
                raise ExportError(f"forward replaces the tied buffer '{name}', which is also '{first}'; untie them")
        state |= {LOSS + name: value for name, value in of_loss.items()}
        return output, {name: state[name] for name in buffers}


def run_make(make):
    try:
        return make()
    except Exception as error:
        raise ExportError(f"{make.__name__}() failed: {type(error).__name__}", user_trace(error)) from error


def read_result(result, name):
    """The module, its inputs as a list of tuples, and the loss of what make() returned."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise UsageError(f"{name}() returned {type(result).__name__}; {EXPECTED}")
    module, inputs, loss = (*result, None)[:3]
    if not isinstance(module, nn.Module):
        raise UsageError(f"{name}() returned {type(module).__name__} as module; {EXPECTED}")
    if loss is not None and not callable(loss):
        raise UsageError(f"{name}() returned {type(loss).__name__} as loss; return a function of (output, target)")
    sets = inputs if isinstance(inputs, list) else [inputs]
    if not sets:
        raise UsageError(f"{name}() returned an empty list of inputs; {EXPECTED}")
    for values in sets:
        if not isinstance(values, tuple):
            raise UsageError(f"{name}() returned {type(values).__name__} as inputs; {EXPECTED}")
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"{name}() returned {type(value).__name__} as input {index}; all inputs must be tensors: "
                    "keep other arguments as members of the module"
                )
        if loss is not None and not values:
            raise UsageError(f"{name}() returned a loss but no target; the target is the last tensor of the inputs")
        if len(values) != len(sets[0]):
            raise UsageError(f"{name}() returned sets of {len(sets[0])} and of {len(values)} inputs; use one number")
    seen = {}
    for index, values in enumerate(sets):
        first = seen.setdefault(describe_shapes(values), index)
        if first != index:
            shapes = describe_shapes(values)
            raise UsageError(f"{name}() returned the inputs {shapes} twice, as sets {first} and {index}")
    if not module.training:
        raise UsageError(f"{name}() returned the module in evaluation mode; call module.train() before returning it")
    return module, sets, loss


def find_device(module, requested):
    """The device of the graphs: the requested one, or that of the module."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA GPU here; export on a machine with the GPU that will train")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise ExportError(f"'{name}' is not initialized; run the module once in make()")
        if tensor.device.type == "meta":
            raise ExportError(f"'{name}' is on the device meta; make() must return a module with values")
    if requested:
        return torch.device("cuda", torch.cuda.current_device()) if requested == "cuda" else torch.device("cpu")
    for name, tensor in tensors:
        if tensor.device != tensors[0][1].device:
            raise ExportError(
                f"'{tensors[0][0]}' is on {tensors[0][1].device}, '{name}' is on {tensor.device}; "
                "a module must be on one device (or give --device)"
            )
    device = tensors[0][1].device if tensors else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise ExportError(f"the module is on {device}; use --device cpu or --device cuda")
    return device


def first_names(named):
    """The unique tensors of pairs (name, tensor), and {other name: first name}."""
    unique, aliases, names = {}, {}, {}
    for name, tensor in named:
        if id(tensor) in names:
            aliases[name] = names[id(tensor)]
        else:
            names[id(tensor)] = name
            unique[name] = tensor
    return unique, aliases


def refuse_shared_memory(tensors):
    """Different tensors must not share memory: an update of one would change the other in eager mode only."""
    owners = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        owner = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
        if owner != name:
            raise ExportError(f"'{owner}' and '{name}' share memory but are two tensors; use one nn.Parameter for both")


def contiguous(tensor):
    """A detached tensor, contiguous, in memory that belongs to no larger tensor."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def read_state(task):
    """Fills in the names and the values of a task's module."""
    named = list(task.module.named_parameters(remove_duplicate=False))
    parameters, aliases = first_names(named)
    refuse_shared_memory(parameters)
    buffers, buffer_aliases = first_names(task.module.named_buffers(remove_duplicate=False))
    task.aliases = aliases | buffer_aliases
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ExportError(f"{type(task.module).__name__} has no parameter that requires a gradient: nothing to train")
    task.parameters = {
        name: contiguous(value).requires_grad_(value.requires_grad) for name, value in parameters.items()
    }
    task.buffers = {name: contiguous(value) for name, value in buffers.items()}

    values = task.parameters | task.buffers
    on_cpu = {name: value.detach().cpu() for name, value in values.items()}
    on_cpu |= {name: on_cpu[first] for name, first in task.aliases.items()}
    state_dict = task.module.state_dict()
    for name, value in state_dict.items():
        if name not in on_cpu or not isinstance(value, torch.Tensor) or value.shape != on_cpu[name].shape:
            raise ExportError(f"state_dict() has '{name}', which is neither a parameter nor a buffer; remove it")
    for name, _ in named:
        if name not in state_dict:
            raise ExportError(f"the parameter '{name}' is missing in state_dict(); remove the hook that renames it")
    task.state_dict = {name: on_cpu[name] for name in state_dict}
    task.constants = {name: on_cpu[name] for name in buffers if name not in state_dict}

    if isinstance(task.loss, nn.Module):
        for name, _ in task.loss.named_parameters():
            raise ExportError(f"the loss has the parameter '{name}'; make it a parameter of the module")
        for name, value in task.loss.named_buffers():
            if LOSS + name in on_cpu:
                raise ExportError(f"the module and the loss both have a buffer '{LOSS}{name}'; rename one")
            task.loss_buffers.append(LOSS + name)
            task.buffers[LOSS + name] = contiguous(value)
            task.constants[LOSS + name] = value.detach().cpu()


def make_task(make, device=None, autocast=None):
    """Calls make() and checks the result."""
    module, sets, loss = read_result(run_make(make), make.__name__)
    device = find_device(module, device)
    module.to(device)
    if isinstance(loss, nn.Module):
        loss.to(device)
    sets = [
        tuple(
            value.detach().to(device).clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)
            for value in values
        )
        for values in sets
    ]
    task = Task(module, loss, sets, device, autocast)
    read_state(task)
    return task
