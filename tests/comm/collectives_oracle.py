"""Prints what torch.distributed gives for calls that collectives_oracle_test.cpp makes too: a line for each rank and
call, "rank call numbers"."""

import multiprocessing
import os
import sys
import tempfile

import torch
import torch.distributed as dist

RANKS = 3


def values(rank, count):
    return torch.arange(count, dtype=torch.float32) * 0.5 + 100 * rank


def rows(sender, receiver):
    return (sender * 3 + receiver * 2) % 5


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = []

    sent = [rows(rank, other) for other in range(RANKS)]
    received = [rows(other, rank) for other in range(RANKS)]
    output = torch.zeros(sum(received), 2)
    dist.all_to_all_single(output, values(rank, 2 * sum(sent)).view(-1, 2), received, sent)
    results.append(("all_to_all_single", output))
    output = torch.zeros(2 * RANKS)
    dist.all_to_all_single(output, values(rank, 2 * RANKS))
    results.append(("all_to_all_equal", output))

    several = [values(rank, 4), values(rank, 1), values(rank, 9)]
    dist.all_reduce_coalesced(several)
    results.append(("all_reduce_coalesced", torch.cat(several)))

    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    halo = torch.zeros(2, 5)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, values(rank, 5), after), dist.P2POp(dist.irecv, halo[0], before),
            dist.P2POp(dist.isend, values(rank, 5) + 1, before), dist.P2POp(dist.irecv, halo[1], after)]):
        work.wait()
    results.append(("batch_isend_irecv", halo))

    # Gloo has no reduce_scatter in all versions: its definition, by all_reduce.
    parts = [values(rank, part) for part in (0, 4, 7)]
    for part in parts:
        dist.all_reduce(part)
    results.append(("reduce_scatter", parts[rank]))

    if hasattr(dist, "send_object_list"):
        objects = [{"name": f"from {rank}", "n": rank}]
        if rank == 0:
            dist.send_object_list(objects, 1)
        elif rank == 1:
            dist.recv_object_list(objects, 0)
        results.append(("send_object_list", torch.tensor([float(objects[0]["n"]), len(objects[0]["name"])])))

    if rank == 2:
        source = torch.zeros(1)
        from_ranks = sorted([dist.recv(source), dist.recv(source)])
        results.append(("recv_any", torch.tensor(from_ranks, dtype=torch.float32)))
    else:
        dist.send(torch.ones(1), 2)

    dist.barrier()
    with open(f"{folder}/{rank}", "w") as file:
        for call, tensor in results:
            print(rank, call, *tensor.flatten().tolist(), file=file)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("fork").Process(target=main, args=(rank, folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)
        for rank in range(RANKS):
            with open(f"{folder}/{rank}") as file:
                sys.stdout.write(file.read())
