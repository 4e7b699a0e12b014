"""All-reduce of PyTorch's own Gloo, in Python, for comparison with `lockstep bench all-reduce`: the same protocol (ranks
released together, buffers rewritten, the slowest rank counts, medians, results checked).

    folder=$(mktemp -d); lockstep run -n 16 python3 benchmarks/python_gloo.py $folder/store 4194304 26214400
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=world_size)
for size in map(int, sys.argv[2:]):
    tensor = torch.empty(size // 4)
    times = []
    for round in range(13):
        tensor.fill_(rank + 1)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        assert bool((tensor == world_size * (world_size + 1) / 2).all()), "wrong result"
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if round >= 2:
            times.append(took.item() * 1e6)
    if rank == 0:
        print(f"PyTorch {torch.__version__} Gloo, {world_size} ranks, {size} bytes: {statistics.median(times):.0f} us "
              f"({min(times):.0f} to {max(times):.0f})", flush=True)
dist.destroy_process_group()
