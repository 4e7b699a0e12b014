"""The two ways in which an export fails, and what they do with the user's own exceptions."""

import os
import sys
import traceback


class UsageError(Exception):
    """The command line or the result of make() is wrong. Exit code 2."""


class ExportError(Exception):
    """The model cannot be exported. Exit code 1. `trace` is the part of a traceback that lies in the user's code."""

    def __init__(self, message, trace=""):
        super().__init__(message)
        self.trace = trace


OUR_FOLDER = os.path.dirname(os.path.abspath(__file__))
OUR_SCRIPT = os.path.join(os.path.dirname(OUR_FOLDER), "compile_model.py")


def user_frames(error):
    """The frames of an exception that lie neither in torch, nor in Python's library, nor in the exporter."""
    foreign = [os.path.dirname(os.__file__) + os.sep, OUR_FOLDER + os.sep, OUR_SCRIPT, "<"]
    torch = sys.modules.get("torch")
    if torch is not None:
        foreign.append(os.path.dirname(torch.__file__) + os.sep)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(tuple(foreign))]


def user_trace(error):
    """The traceback of an exception without the frames of torch and of the exporter; "" if no frame is left."""
    frames = user_frames(error)
    if not frames and not isinstance(error, SyntaxError):
        return ""
    lines = ["Traceback (most recent call last):\n"] if frames else []
    return "".join(lines + traceback.format_list(frames) + traceback.format_exception_only(error)).rstrip("\n")


def user_line(error):
    """The innermost line of the user's code, as "model.py:12: "; "" if there is none."""
    frames = user_frames(error)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""


def first_line(error):
    """An exception's message on one line, without advice that is meant for developers of PyTorch."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
