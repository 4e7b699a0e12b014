"""Does what a page tells its reader: writes the files that it shows and executes its ```sh blocks, in order.

    follow_page.py PAGE FOLDER [--root ROOT] [--skip HEADING]...

FOLDER is where the reader works; with --root, inside that root directory (chroot). A section whose heading contains
HEADING is skipped. A file is a code block after a line "File `path`:". A block that fails ends the program with its
exit code. Prints each command and its output.
"""

import argparse
import pathlib
import re
import subprocess
import sys


def steps(page):
    """Yields (heading, kind, text): kind is "sh", or the path of a file."""
    heading, file, block = "", None, None
    for line in page.read_text().splitlines():
        if block is not None:
            if line.startswith("```"):
                if block[0]:
                    yield heading, block[0], "\n".join(block[1]) + "\n"
                block, file = None, None
            else:
                block[1].append(line)
        elif match := re.fullmatch(r"```(\w*)", line):
            block = (file or ("sh" if match[1] == "sh" else None), [])
        elif match := re.fullmatch(r"#+ (.*)", line):
            heading = match[1]
        elif match := re.fullmatch(r"File `(.+)`:", line):
            file = match[1]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("page", type=pathlib.Path)
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--root", type=pathlib.Path)
    arguments.add_argument("--skip", action="append", default=[])
    options = arguments.parse_args()
    inside = (options.root / str(options.folder).lstrip("/")) if options.root else options.folder
    inside.mkdir(parents=True, exist_ok=True)
    executed = 0
    for heading, kind, text in steps(options.page):
        if any(word in heading for word in options.skip):
            continue
        if kind != "sh":
            path = inside / kind
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:  # a build that is kept stays up to date
                path.write_text(text)
            continue
        print(f"--- {heading}\n{text}", flush=True)
        script = f"set -e; cd {options.folder}\n{text}"
        command = ["chroot", str(options.root), "bash", "-c", script] if options.root else ["bash", "-c", script]
        code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        if code != 0:
            sys.exit(f"{options.page}: the block under '{heading}' ended with exit code {code}")
        executed += 1
    print(f"{executed} blocks of {options.page.name} executed")
    if executed == 0:
        sys.exit("no block was executed")


main()
