"""Trains on one GPU; started by `lockstep bench gpu --against python`.

    gpu_trainer.py plain|graph|ddp|best|default|reduce-overhead|max-autotune

plain is the module alone, graph the module as a CUDA graph, ddp DistributedDataParallel over NCCL with default settings,
best with the fastest settings. The others are modes of torch.compile, for the module with its loss. Prints the version of torch when it has the GPU, then answers each line on stdin with one
line on stdout:

    model NAME [FILE]    creates this model with its initial weights; the compiled FILE is for lockstep-bench
    train STEPS   trains it; answers the loss of the last step
    peak          answers the peak bytes of PyTorch's allocator
    drop          frees the model's memory
"""

import gc
import os
import signal
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from python_rank import make_model

SEED, DATA_SEED = 1, 2
IMAGES, CLASSES = 64, 10
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
IMAGE_MODELS = {"mlp-small": "small", "cnn": "cnn"}
GPTS = {
    "gpt-6x384": dict(layers=6, width=384, heads=6, context=256, vocabulary=96, batch=64),
    "gpt-124m": dict(layers=12, width=768, heads=12, context=1024, vocabulary=50304, batch=8),
}


def make_embedding(count, width):
    embedding = nn.Embedding(count, width)
    nn.init.normal_(embedding.weight, 0, 0.02)
    return embedding


class Block(nn.Module):
    """The layers of Block in gpu_trainer.cpp."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def attend(self, qkv):
        batch, context, width = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        q, k, v = qkv.view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, context, width)

    def forward(self, x):
        x = x + self.projection(self.attend(self.qkv(self.norm1(x))))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Gpt(nn.Module):
    """The layers of Gpt in gpu_trainer.cpp."""

    def __init__(self, layers, width, heads, context, vocabulary, batch):
        super().__init__()
        self.tokens = make_embedding(vocabulary, width)
        self.positions = make_embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)


def make_task(name):
    """The model, a batch and its targets, on the CPU: make_gpu_task in gpu_trainer.cpp."""
    torch.manual_seed(SEED)
    if name in IMAGE_MODELS:
        model = make_model(IMAGE_MODELS[name])
        torch.manual_seed(DATA_SEED)
        shape = (1, 28, 28) if name == "cnn" else (784,)
        return model, torch.randn(IMAGES, *shape), torch.randint(CLASSES, (IMAGES,))
    size = GPTS[name]
    model = Gpt(**size)
    torch.manual_seed(DATA_SEED)
    tokens = torch.randint(size["vocabulary"], (size["batch"], size["context"]))
    return model, tokens, torch.randint(size["vocabulary"], (size["batch"] * size["context"],))


def make_for_export(name):
    """What a function returns that `lockstep compile` calls."""
    model, data, target = make_task(name)
    return model.cuda(), (data.cuda(), target.cuda()), F.cross_entropy


def make_mlp_small():
    return make_for_export("mlp-small")


def make_cnn():
    return make_for_export("cnn")


def make_gpt_6x384():
    return make_for_export("gpt-6x384")


def make_gpt_124m():
    return make_for_export("gpt-124m")


class Training:
    def __init__(self, name, side):
        model, data, target = make_task(name)
        model = model.cuda()
        self.data, self.target = data.cuda(), target.cuda()
        self.in_bfloat16 = name in GPTS
        self.is_graph = side == "graph"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=self.is_graph)
        self.warm_up = 3  # steps before the graph is captured
        self.graph = None
        if side == "ddp":
            model = DistributedDataParallel(model, device_ids=[0])
        elif side == "best":
            model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
            )
        self.loss_of = lambda data, target: F.cross_entropy(model(data), target)
        if side in COMPILE_MODES:
            self.loss_of = torch.compile(self.loss_of, mode=side)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if self.in_bfloat16 else nullcontext():
            loss = self.loss_of(self.data, self.target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step_by_graph(self):
        if self.warm_up > 0:
            self.warm_up -= 1
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                loss = self.step()
            torch.cuda.current_stream().wait_stream(beside)
            return loss
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self.step()
        self.graph.replay()
        return self.loss

    def train(self, steps):
        for _ in range(steps):
            loss = self.step_by_graph() if self.is_graph else self.step()
        last = loss.item()
        torch.cuda.synchronize()
        return last


def free_memory():
    torch.compiler.reset()  # graphs keep memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def main(side):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when stdin ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    answers = os.dup(1)
    os.dup2(2, 1)  # other output must not mix with the answers
    torch.set_float32_matmul_precision("high")
    torch.cuda.set_device(0)
    if side in ("ddp", "best"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    os.write(answers, f"{torch.__version__}\n".encode())
    training = None
    for line in iter(sys.stdin.readline, ""):
        command, *argument = line.split()
        answer = ""
        if command == "train":
            answer = training.train(*map(int, argument))
        elif command == "peak":
            answer = torch.cuda.max_memory_allocated()
        else:
            training = None
            free_memory()
            if command == "model":
                training = Training(argument[0], side)
        os.write(answers, f"{answer}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
