"""What PyTorch's own samplers draw.

Reads cases from standard input, one per line, and writes one line per case: its indices, separated by spaces.

    random SEED REPLACEMENT NUM_SAMPLES DATASET_SIZE
    weighted SEED REPLACEMENT NUM_SAMPLES WEIGHT...
    subset SEED INDEX...
"""
import sys

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

for line in sys.stdin:
    kind, seed, *rest = line.split()
    generator = torch.Generator()
    generator.manual_seed(int(seed))
    if kind == "subset":
        sampler = SubsetRandomSampler([int(word) for word in rest], generator=generator)
    else:
        replacement, num_samples = bool(int(rest[0])), int(rest[1])
        if kind == "random":
            sampler = RandomSampler(range(int(rest[2])), replacement, num_samples, generator)
        else:
            sampler = WeightedRandomSampler([float(word) for word in rest[2:]], num_samples, replacement, generator)
    print(*sampler)
