"""A store that keeps its values on parameter servers.

Read `store` (the calls), `wire` (this worker's memory, and which server gets which part of it), `client` (requests,
retries, stall reports), `session` (this worker's membership of the job), `store_session` (its part in one store),
`states` (optimizer state on the servers).
"""
