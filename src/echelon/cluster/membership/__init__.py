"""The members of a job: who may join, what a death means, and when the job ends. Pure.

`membership`                the state machine: registration, joins, returns, deaths, the end; `rules` are its settings
`members`, `views`          who lives, and the numbered states that all processes receive
`stores`, `barriers`        which worker has which store open; `store_messages` are what workers say about them
`slices`, `slice_messages`  which server stores which slice, and what follows when a server is lost or joins
`leaving`, `unregistered`   workers that were told to end, and those that have not registered
`rebuilding`                what a scheduler that was started again learns; `patience` counts ticks
"""
