"""The store without servers, on torch.distributed.

Read in this order: `store` (the calls), `process_group` (the collectives), `rendezvous` (how members find each other).
"""
