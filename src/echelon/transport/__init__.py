"""Moving bytes between processes.

`interface` defines a transport; `in_process`, `sockets` (TCP) and `shared_memory` implement it. `connection` is one TCP
connection of the last two. `admission` has a job's secret and proves it when a connection begins. `control` is every
process's connection to the scheduler, whose end means that the process has died, and `registration` is how a process
joins a job over it. `choose` returns the transport of a job. Nothing is imported here, so that launchers and the
scheduler need neither numpy nor memory for tensors.
"""
