"""Exports a PyTorch module for training in C++; started by `lockstep compile`.

    compile_model.py MODEL.py:FUNCTION -o FILE [OPTIONS]

FUNCTION() returns (module, inputs) or (module, inputs, loss). `inputs` is a tuple of tensors, or a list of such tuples:
one for each set of shapes. With a loss, the last tensor is the target: training computes
loss(module(*inputs[:-1]), inputs[-1]).
"""

import argparse
import importlib.util
import os
import sys

from lockstep_compile.errors import ExportError, UsageError, user_trace


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"lockstep compile: {message}; see lockstep compile --help", file=sys.stderr)
        sys.exit(2)


def parse(arguments):
    parser = Parser(
        prog="lockstep compile",
        description="Exports a PyTorch module and its training graphs into a file for lockstep::CompiledModule.",
        epilog="FUNCTION() returns (module, inputs) or (module, inputs, loss). inputs is a tuple of tensors, or a list "
        "of such tuples: one for each set of shapes. With a loss, the last tensor is the target: training computes "
        "loss(module(*inputs[:-1]), inputs[-1]).",
    )
    parser.add_argument("model", metavar="MODEL.py:FUNCTION", help="the function that creates the module")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to be written, a .pt2")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="run module and loss in torch.autocast")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where to train (default: the module's device)")
    parser.add_argument("--max-autotune", action="store_true", help="let Inductor measure more kernels; takes minutes")
    parser.add_argument(
        "--precision",
        choices=["highest", "high"],
        default="highest",
        help="of float32 matrix multiplications: high uses TF32 (default: highest)",
    )
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare with eager mode")
    return parser.parse_args(arguments)


def load_function(text):
    """The function named by MODEL.py:FUNCTION."""
    path, separator, name = text.rpartition(":")
    if not separator or not path or not name.isidentifier():
        raise UsageError(f"{text}: give a file and a function in it, as in model.py:make")
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such file")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    if spec is None:
        raise UsageError(f"{path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ExportError(f"{path} cannot be imported: {type(error).__name__}", user_trace(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and key.startswith("make")]
        raise UsageError(f"{path}: no function {name}" + (f"; it has {', '.join(functions[:5])}" if functions else ""))
    return function


def main(arguments):
    given = parse(arguments)
    try:
        function = load_function(given.model)
        from lockstep_compile.exporter import Options, export  # imports torch, which takes seconds

        options = Options(given.autocast, given.device, given.max_autotune, given.precision, given.check)
        export(function, given.output, options, lambda line: print(line, flush=True))
    except UsageError as error:
        print(f"lockstep compile: {error}", file=sys.stderr)
        return 2
    except ExportError as error:
        if error.trace:
            print(error.trace, file=sys.stderr)
        print(f"lockstep compile: {given.model} cannot be exported: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"lockstep compile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
