"""The store without servers, on torch.distributed.

Read in this order: `store` (the calls), `process_group` (the collectives), `world` (torch.distributed in
this process), `rendezvous` (how members find each other).
"""
