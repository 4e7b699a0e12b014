"""What PyTorch's own random_split draws.

Reads cases from standard input, one per line, and writes one line per case: the indices of all parts, each part followed
by "|".

    SEED DATASET_SIZE SIZE...
"""
import sys

import torch
from torch.utils.data import random_split

for line in sys.stdin:
    seed, size, *sizes = line.split()
    generator = torch.Generator()
    generator.manual_seed(int(seed))
    sizes = [float(word) if "." in word else int(word) for word in sizes]
    parts = random_split(range(int(size)), sizes, generator)
    print(*[" ".join([*map(str, part.indices), "|"]) for part in parts])
