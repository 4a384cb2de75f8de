"""A server process: it stores a part of the weights, sums gradients and runs the optimizer.

Read in this order:

`serve`             the loop: receives requests, sends answers, follows changes of the view
`shard`             what happens with each kind of request
`pending_requests`  pushes and pulls until they are answered; `lanes` groups keys that are pushed together
`memory`            where the tensors of a request are; `factored` for gradients that arrive as two factors
`optimizer`         the optimizer of the job: kernels, states (to add one, see `echelon.optim`)
`tables`, `rows`    tables of embeddings, which are stored and updated by rows
`gathering`         values that workers exchange, such as metrics
`execute`           the arithmetic: sum, update, copy

A push takes this way: `Shard._push`, `PendingRequests.push`, `Engine.push`, `Optimization.tasks`, `Storage.run`.
When an update happens and who waits is decided in `echelon.schemes`.
"""
