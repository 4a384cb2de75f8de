"""Pure knowledge of the job: messages, who is alive, where keys live, groups and data shares."""
