"""Embeddings with sparse gradients: only the rows of a batch travel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from loops.kinds import TARGETS
from loops.loop import Result, Run, loop
from loops.models import WIDTH, begin, step

ROWS = 40


class Words(nn.Module):
    """The mean of the embeddings of some words."""

    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag] = nn.Embedding) -> None:
        super().__init__()
        self.words = kind(ROWS, TARGETS, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens)
        return found.mean(1) if found.ndim == 3 else found


def tokens_of(inputs: Tensor) -> Tensor:
    """Return words whose rows a batch uses more than once."""
    return (inputs.abs() * 20).long() % ROWS


def trains(run: Run, make: Callable[[nn.Module], Optimizer], network: nn.Module) -> Result:
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns unless this is said
    model, optimizer, net = begin(run, network, optimizer=make)
    for inputs, targets in run.batches():
        loss = mse_loss(net(tokens_of(inputs)), targets)
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("nn.Embedding(sparse=True) with SGD")
def sgd(run: Run) -> Result:
    return trains(run, lambda model: SGD(model.parameters(), lr=0.5), Words())


@loop("nn.Embedding(sparse=True) with Adagrad")
def adagrad(run: Run) -> Result:
    return trains(run, lambda model: Adagrad(model.parameters(), lr=0.5), Words())


@loop("nn.Embedding(sparse=True) with SparseAdam", magnification=100.0)
def sparse_adam(run: Run) -> Result:
    return trains(run, lambda model: SparseAdam(list(model.parameters()), lr=0.1), Words())


@loop("nn.EmbeddingBag(sparse=True) with SGD")
def bag(run: Run) -> Result:
    return trains(run, lambda model: SGD(model.parameters(), lr=0.5), Words(nn.EmbeddingBag))


@loop("a sparse embedding with a padding row")
def padding(run: Run) -> Result:
    network = Words()
    network.words = nn.Embedding(ROWS, TARGETS, sparse=True, padding_idx=0)
    return trains(run, lambda model: SGD(model.parameters(), lr=0.5), network)


class Recommender(nn.Module):
    """A sparse table and dense layers, as DLRM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        self.top = nn.Linear(WIDTH, TARGETS)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.top(torch.tanh(self.table(tokens)))
        return outputs


@loop("a sparse table and dense layers with one SGD (DLRM)")
def dlrm(run: Run) -> Result:
    return trains(run, lambda model: SGD(model.parameters(), lr=0.1), Recommender())


@loop("dense embeddings with Adam, tied to the output layer")
def dense_tied(run: Run) -> Result:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, WIDTH)
            self.head = nn.Linear(WIDTH, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: Tensor) -> Tensor:
            outputs: Tensor = self.head(self.words(tokens % 11).mean(1))
            return outputs[:, :TARGETS]

    return trains(run, lambda model: Adam(model.parameters(), lr=0.01), Tied())
