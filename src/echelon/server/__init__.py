"""A server process: it stores a part of the weights, sums gradients and runs the optimizer.

Read in this order:

`serve`      the loop: receives requests, sends answers, follows changes of the view
`reception`  what the messages of a connection mean, and which slice they are for
`slices`     the slices that this server stores, their backups, and how they are rebuilt
`shard`      what happens with each kind of request; pushes and pulls until they are answered
`storage`    weights, tables and optimizer states in memory, and the arithmetic: sum, update, copy
`optimizer`  the kernels of the optimizers (to add one, see `echelon.optim`)

A push takes this way: `Shard._push`, `PendingRequests.push`, `Engine.push`, `Optimization.tasks`, `Storage.run`.
When an update happens and who waits is decided in `echelon.schemes`.
"""
