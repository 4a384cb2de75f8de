"""One server's part of one store: what each request does.

`shard`             each kind of request; `frame_limits` says what a request may bring
`pending_requests`  pushes and pulls until they are answered; `waiting_requests` finds them, `resuming` ends pauses
`room`              how much memory waiting gradients may use
`work`              samples whose steps were applied
`gathering`         values that workers exchange, such as metrics; `newcomers` those that a joining worker needs
`activity`          what the event log shows; `arrivals` when pushes arrive
`snapshot`          the whole state, for a backup: what is added to a shard's state must be added there
"""
