"""Modules that export_models.py exports for the tests of lockstep::CompiledModule. Small: each graph takes seconds."""

import torch
from torch import nn
from torch.nn import functional as F


def make_mlp():
    """For a batch, and for half of it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    inputs = torch.randn(4, 8, dtype=torch.float64), torch.randint(3, (4,))
    return module, [inputs, tuple(value[:2] for value in inputs)], F.cross_entropy


def make_batch_norm():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5)
    )
    return module.double(), (torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.randint(5, (8,))), F.cross_entropy


class Dropout(nn.Module):
    """Returns the input with dropped elements; the weights are ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x * self.weight)


def make_dropout():
    return Dropout(), (torch.ones(16, 64),)


class TiedTransformer(nn.Module):
    """One block; the head is the embedding."""

    def __init__(self, vocabulary=11, width=16, heads=2, context=6):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.register_buffer("positions", torch.arange(context), persistent=False)
        self.places = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places(self.positions)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        return self.head(x + self.projection(attended.transpose(1, 2).flatten(2)))


def token_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def make_tied():
    torch.manual_seed(0)
    tokens, targets = torch.randint(11, (2, 6)), torch.randint(11, (2, 6))
    return TiedTransformer(), (tokens, targets), token_loss


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x))


def make_unused():
    torch.manual_seed(0)
    inputs = (torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64))
    return Unused().double(), inputs, F.mse_loss


class Outputs(nn.Module):
    """Counts its calls in training. `hidden` is a view of a parameter's product, `first` an input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, scale):
        if self.training:
            self.calls = self.calls + 1
        hidden = x @ self.weight
        return {"sum": hidden.sin().sum(1) * scale, "hidden": (hidden.t(), x)}


def make_outputs():
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    return Outputs(), (x, torch.randn(3, dtype=torch.float64))
