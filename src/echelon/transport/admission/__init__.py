"""Connections that prove the secret of the job before they carry anything.

`credentials` are the secret, `handshake` proves it (pure), `admission` opens and accepts connections by it, in a thread
of its own with `admission_thread`, and `channel` is the connection afterwards.
"""
