"""A store without servers: torch.distributed between the processes. Read `store`, `process_group`, `rendezvous`."""
