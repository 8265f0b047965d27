"""The benchmark: one job under each layout and under each peer that is installed, in rounds in which they take turns.

settings    what is run, and how often                                          (values; no torch)
contenders  who runs it, by name, and who cannot, with the reason              (values; no torch)
models      the jobs: models and batches                                        in the ranks' processes
sides       the contenders: forward and backward, and the optimizer step        in the ranks' processes
measure     storages, resident sets, page faults                                in the ranks' processes
rank        a process that is one rank of one contender: it waits for orders    in the ranks' processes
teams       the ranks of one contender, seen from outside
rounds      who runs when
results     medians, ratios, losses compared                                    (pure functions)
show        tables and progress
timeline    one step of two contenders as a picture
"""
