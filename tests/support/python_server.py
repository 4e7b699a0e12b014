"""Runs scripts in forks of a process that has imported torch, which takes seconds.

Reads one line for each script: files for its standard input and output, its path and its arguments, separated by tabs.
Prints "exited CODE" after the script has ended. What scripts print to standard error passes through.
"""
import os
import runpy
import sys

import torch  # for the scripts


def run(stdin, stdout, script, *arguments):
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
    sys.stdin = open(0)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(*line.rstrip("\n").split("\t"))
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"\nexited {code}", flush=True)
