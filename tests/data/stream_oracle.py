"""The batches of Python's DataLoader over an IterableDataset that is divided by hand.

Reads cases from standard input, one per line, and writes one line per case: its batches, separated by spaces, each with
its samples, separated by commas. Part p has the samples 1000 p, 1000 p + 1, ...

    RANK RANKS WORKERS BATCH_SIZE DROP_LAST SAMPLES_OF_PART_0 SAMPLES_OF_PART_1 ...
"""
import sys
import warnings

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

warnings.filterwarnings("ignore", message="This DataLoader will create")  # of more workers than cores


class Divided(IterableDataset):
    def __init__(self, rank, ranks, samples):
        self.rank, self.ranks, self.samples = rank, ranks, samples

    def __iter__(self):
        worker = get_worker_info()
        part = self.rank + self.ranks * (worker.id if worker else 0)
        return iter(range(1000 * part, 1000 * part + self.samples[part]))


for line in sys.stdin:
    rank, ranks, workers, batch_size, drop_last, *samples = (int(word) for word in line.split())
    loader = DataLoader(Divided(rank, ranks, samples), batch_size=batch_size, num_workers=workers,
                        drop_last=bool(drop_last))
    print(*(",".join(str(sample) for sample in batch.tolist()) for batch in loader))
