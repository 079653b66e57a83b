"""From prompts to a trace: sample shard by shard, then score shard by shard, each renamed in
when it is whole.
"""
