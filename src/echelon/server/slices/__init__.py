"""The slices that a server stores: each as the primary, which answers workers, or as the backup.

`assignment`      which slices this server stores, by the scheduler's views
`hosted_slice`    one slice: a shard for each store of the job
`seats`           the connections of workers to slices; `early_messages` came before the view did
`backups`         what slices send to other servers; `replication` numbers it, `links` are the connections
`recovery`        a slice without a backup: the workers have its weights, `state_file` its optimizer state
"""
