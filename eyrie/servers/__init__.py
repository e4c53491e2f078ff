"""Servers that Eyrie starts itself: one per set of arguments, shared by jobs through leases, never left behind.

A job takes a lease (:func:`eyrie.servers.lease.lease`). The first lease starts a supervisor, which starts the server
through a guard; when the last lease has been gone for a while, the server is stopped. A lease is a lock that the
kernel drops when its holder dies, however it dies.
"""
