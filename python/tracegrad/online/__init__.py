"""The online loop: play, score, write, train, push, and prove at every step that the push arrived.

The folder is the queue: what is played is written by whole groups, and the trainer reads what is written. So a run can
be replayed bit for bit, looked at while it runs, and cut anywhere. Importing this needs no torch.
"""
