"""Message passing and collectives that can be read.

Start at `communicator`, the protocol; then `ring`, a collective in a screenful; then a transport, `threads` being
the shortest.
"""
