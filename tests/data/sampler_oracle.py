"""What PyTorch's own DistributedSampler deals out.

Reads cases from standard input, one per line: n replicas rank shuffle seed epoch drop_last.
Writes one line per case: its indices, separated by spaces.
"""
import sys

from torch.utils.data.distributed import DistributedSampler

for line in sys.stdin:
    n, replicas, rank, shuffle, seed, epoch, drop_last = map(int, line.split())
    sampler = DistributedSampler(range(n), num_replicas=replicas, rank=rank, shuffle=bool(shuffle), seed=seed,
                                 drop_last=bool(drop_last))
    sampler.set_epoch(epoch)
    print(*sampler)
