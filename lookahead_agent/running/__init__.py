"""Engines that stay: one process keeps them (`lookahead-agent up`), and others of the same user have replies from them.

address.py  where the keeper's socket is, and who may use it
wire.py     requests, events and replies as JSON
keeper.py   the side that has the engines
client.py   the side that asks
"""
