"""test_slow_links runs this program in every role: how many other keys a worker has when the first layer arrives."""

import sys

import torch

from echelon import kvstore
from echelon.cluster.messages import PushHeader
from echelon.kvstore.servers.store import ServerStore

LAYERS = 40
MEGABYTE = 1 << 18  # elements of float32

kv = kvstore.create("dist_sync")
assert isinstance(kv, ServerStore)
names = [str(layer) for layer in range(LAYERS)]
kv.init(names, [torch.zeros(MEGABYTE)] * LAYERS)
for use_priority in (False, True):
    tickets = {}
    for layer in reversed(range(LAYERS)):  # as backward finishes them
        slots = kv.slots([names[layer]])
        kv.views(names[layer])[1].fill_(layer)
        tickets[layer] = kv.push_bucket(slots, PushHeader(), priority=-layer if use_priority else 0)
    kv.wait(tickets[0])
    before = sum(ticket.response is not None for layer in range(1, LAYERS) for ticket in tickets[layer])
    kv.wait([ticket for layer in range(LAYERS) for ticket in tickets[layer]])
    correct = all(bool((kv.views(names[layer])[0] == layer).all()) for layer in range(LAYERS))
    print(f"priority {use_priority}: {before} layers came before the first one; correct {correct}", flush=True)
kv.close()
sys.exit(0)
