"""A store whose values live on parameter servers.

Read `store` (the calls), `wire` (what is sent to which server), `client` (requests, retries, stall reports), `session`
(this worker's membership of the job), `states` (optimizer state on the servers).
"""
